"""The processes behind a timing, each with as little as its part needs: `python -P -m ... MODE JOB`.

`describe`, `worker`, `bench` and `sanitize` run candidate code, in a sandbox. `reference` runs the pack's
oracle and stock; `sanitize_control` what a sanitizer must report.
`launch` is trusted: it loads cubins by a record and never imports the pack.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, Pack
from harness.domain.record import Record, Whole
from harness.executors.sandbox import ended_words, limit_this_process

__all__ = ["LaunchJob", "OpJob", "child_command", "main", "run_child", "write_job"]

DESCRIBED, REASON, RUN, TIMING = "record.json", "reason.txt", "run.json", "timing.json"


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
    blocks: Whole = 0
    """Of `bench`."""


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
    modes = {
        "describe": _describe, "reference": _reference, "worker": _serve, "bench": _bench,
        "sanitize": _sanitize, "sanitize_control": _sanitize_control,
    }  # fmt: skip
    modes[mode](job)
    return 0


def write_job(folder: Path, name: str, job: Record) -> Path:
    """A job as a file that a child reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.job.json"
    path.write_bytes(job.canonical())
    return path


def run_child(argv: Sequence[str], environment: Mapping[str, str] | None, log: Path, limit_s: float) -> str:
    """Run a child to its end, its words in `log`; gives how it ended, in words."""
    with log.open("wb") as sink:
        try:
            done = subprocess.run(
                argv, env=environment, stdout=sink, stderr=sink, timeout=limit_s, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no answer after {limit_s:.0f} s"
    return ended_words(done.returncode)


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


def _bench(job: OpJob) -> None:
    """Stock and candidate interleaved; leaves `timing.json`."""
    from harness.measure.bench import time_op

    pack, _ = _opened(job)
    found = time_op(
        pack, job.op, job.implementation, job.cell, job.model, seed=job.seeds[0], blocks=job.blocks
    )
    (Path(job.folder) / TIMING).write_bytes(found.canonical())


def _sanitize(job: OpJob) -> None:
    from harness.measure.sanitized import call_once

    pack, contract = _opened(job)
    call_once(pack, contract, job.cell, job.model, job.implementation, job.seeds[0])


def _sanitize_control(job: OpJob) -> None:
    """The tool is named in front of the regime."""
    from harness.measure.sanitized import plant

    plant(job.regime.partition(":")[0])


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
