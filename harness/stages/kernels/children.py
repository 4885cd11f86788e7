"""The processes behind a timing, each with as little as its part needs: `python -P -m ... MODE JOB`.

`describe` and `worker` run candidate code, in a sandbox. `reference` runs the pack's oracle and stock.
`launch` is trusted: it loads cubins by a record and never imports the pack.
"""

import os
import sys
from pathlib import Path

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, Pack
from harness.domain.record import Record, Whole
from harness.executors.sandbox import limit_this_process

__all__ = ["LaunchJob", "OpJob", "child_command", "main"]

DESCRIBED, REASON, RUN = "record.json", "reason.txt", "run.json"


class OpJob(Record):
    """One op in one cell, for a child."""

    pack: str
    op: str
    cell: Cell
    model: str
    implementation: str
    regime: str
    seeds: tuple[Whole, ...]
    folder: str


class LaunchJob(Record):
    """What the trusted child launches."""

    package: str
    """Import name of the pack: it must not be loaded here."""
    job: str
    """Canonical JSON of a `DescribedJob`."""
    folder: str


def child_command(mode: str, job: Path) -> tuple[str, ...]:
    """Command line of a child. `-P`: no package of the current folder takes our place."""
    return (sys.executable, "-P", "-m", "harness.stages.kernels.children", mode, str(job))


def main(argv: list[str] | None = None) -> int:
    """One child; what it found lies in its job's folder."""
    mode, path = sys.argv[1:] if argv is None else argv
    text = Path(path).read_bytes()
    if mode == "launch":
        _launch(LaunchJob.from_json(text))
        return 0
    limit_this_process()
    job = OpJob.from_json(text)
    {"describe": _describe, "reference": _reference, "worker": _serve}[mode](job)
    return 0


def _describe(job: OpJob) -> None:
    """Leaves `record.json`, or `reason.txt` with why there is none."""
    from harness.measure.describe import Undescribable, describe_op

    folder = Path(job.folder)
    cubins = folder / "cubins"
    cubins.mkdir(parents=True, exist_ok=True)
    # The DSL reads these when it is first imported, which is inside the pack.
    os.environ |= {
        "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(cubins), "CUTE_DSL_NO_CACHE": "1",
    }  # fmt: skip
    pack, contract = _opened(job)
    try:
        record = describe_op(pack, contract, job.cell, job.model, job.implementation, job.seeds[0], folder)
    except Undescribable as error:
        (folder / REASON).write_text(str(error), encoding="utf-8")
        return
    (folder / DESCRIBED).write_bytes(record.canonical())


def _reference(job: OpJob) -> None:
    from harness.measure.reference import write_reference

    pack, contract = _opened(job)
    write_reference(pack, contract, job.cell, job.model, job.regime, job.seeds, Path(job.folder))


def _serve(job: OpJob) -> None:
    from harness.measure.timed_worker import TimedWorker, serve_windows, silence_output

    answers = silence_output()
    pack, contract = _opened(job)
    serve_windows(TimedWorker(pack, contract, job.cell, job.model, job.implementation), sys.stdin, answers)


def _launch(job: LaunchJob) -> None:
    from harness.measure.described_run import DescribedJob, run_described

    run = run_described(DescribedJob.from_json(job.job))
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == job.package)
    if loaded:
        raise AssertionError(f"the process that launches has loaded {loaded[0]}: its times are no one's")
    (Path(job.folder) / RUN).write_bytes(run.canonical())


def _opened(job: OpJob) -> tuple[Pack, OpContract]:
    from harness.engines.packs import load_pack

    pack = load_pack(job.pack)
    return pack, next(o for o in pack.ops() if o.name == job.op)


if __name__ == "__main__":
    sys.exit(main())
