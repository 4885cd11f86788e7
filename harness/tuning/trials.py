"""The child that tries configurations: `python -P -m harness.tuning.trials JOB`, one JSON line a request.

`ceiling` reads how fast this machine reads, `time` times a configuration against the incumbent, `test`
samples kernel checks under a configuration. Nothing is judged here. A configuration may crash or hang the
process; whoever asks takes that as the trial's ending.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from harness.domain.cell import Cell
from harness.domain.check import Check
from harness.domain.record import Record
from harness.domain.tuning import Configuration, TunablePack, TuningSpace

__all__ = ["TrialJob", "main", "trial_command"]


class TrialJob(Record):
    """One space in one cell, for a child."""

    pack: str
    policy: str
    cell: Cell
    model: str
    space: TuningSpace
    built: str
    """Folder of kernels that were compiled ahead; empty: none."""


def trial_command(job: Path) -> tuple[str, ...]:
    """Command line of the child."""
    return (sys.executable, "-P", "-m", "harness.tuning.trials", str(job))


def main(argv: list[str] | None = None) -> int:
    """Answer until the input closes."""
    import json

    from harness.engines.packs import load_pack
    from harness.executors.sandbox import limit_this_process
    from harness.measure.timed_worker import silence_output

    (path,) = sys.argv[1:] if argv is None else argv
    limit_this_process()
    answers = silence_output()
    job = TrialJob.from_json(Path(path).read_bytes())
    pack = load_pack(job.pack)
    tunable = cast("TunablePack", pack)
    with ExitStack() as stack:
        if job.built:
            stack.enter_context(tunable.built(job.space, Path(job.built)))
        for line in sys.stdin:
            asked = json.loads(line)
            answer = _ANSWERS[asked["do"]](pack, job, asked)
            answers.write(json.dumps({"did": asked["do"], **answer}) + "\n")
            answers.flush()
    return 0


def _ceiling(_pack: Any, job: TrialJob, _asked: dict[str, Any]) -> dict[str, Any]:
    from harness.measure.configured import read_ceiling_gb_per_s

    return {"gb_per_s": read_ceiling_gb_per_s(job.cell.arch)}


def _time(pack: Any, job: TrialJob, asked: dict[str, Any]) -> dict[str, Any]:
    from harness.measure.configured import time_configurations

    times = time_configurations(
        pack, pack, job.space, job.cell, job.model, _configuration(asked),
        seed=asked["seed"], blocks=asked["blocks"], has_null=asked["has_null"],
    )  # fmt: skip
    return {"times": times}


def _test(pack: Any, job: TrialJob, asked: dict[str, Any]) -> dict[str, Any]:
    from harness.stages.kernels import sample
    from harness.tuning.desk import context_of

    check = Check.model_validate(asked["check"])
    with pack.configured(job.space, _configuration(asked)):
        samples = sample(check, context_of(pack, job.policy))
    return {"samples": samples.model_dump(mode="json")}


def _configuration(asked: dict[str, Any]) -> Configuration:
    return tuple((str(name), int(value)) for name, value in asked["configuration"])


_ANSWERS = {"ceiling": _ceiling, "time": _time, "test": _test}

if __name__ == "__main__":
    sys.exit(main())
