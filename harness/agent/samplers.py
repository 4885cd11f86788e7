"""The confined child that samples kernel checks: `python -P -m harness.agent.samplers JOB`, a check a line.

It samples only; whoever asks judges. A candidate that crashes or hangs takes this process with it, and that
is the check's result.
"""

import sys
from pathlib import Path

from harness.domain.check import Check
from harness.domain.record import Record

__all__ = ["SampleJob", "main", "sample_command"]


class SampleJob(Record):
    """Over what checks will be asked for; the checks themselves come line by line, and lie in no file."""

    pack: str
    policy: str


def sample_command(job: Path) -> tuple[str, ...]:
    """Command line of the child."""
    return (sys.executable, "-P", "-m", "harness.agent.samplers", str(job))


def main(argv: list[str] | None = None) -> int:
    """Answer until the input closes."""
    import json

    from harness.engines.packs import load_pack
    from harness.executors.sandbox import limit_this_process
    from harness.measure.timed_worker import silence_output
    from harness.stages.kernels import sample
    from harness.tuning.desk import context_of

    (path,) = sys.argv[1:] if argv is None else argv
    limit_this_process()
    answers = silence_output()
    job = SampleJob.from_json(Path(path).read_bytes())
    pack = load_pack(job.pack)
    context = context_of(pack, job.policy)
    for line in sys.stdin:
        samples = sample(Check.model_validate(json.loads(line)["check"]), context)
        answers.write(json.dumps({"samples": samples.model_dump(mode="json")}) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
