"""Time an op so that the candidate cannot say how fast it is: by launches as data, or from outside.

Two kinds. `described`: a sandbox writes down what one call launches, and a process that never imports the
pack loads the cubin, launches, checks and times it. `worker`: where a call cannot be described (Python,
Triton, a CPU), a sandboxed worker times it and a clock outside of the worker must agree. Either way what
*timed* calls left is compared with the oracle, whose answers are written when no candidate's code runs any
more. Seeds come from the caller's, which a candidate cannot know while it is written.
"""

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

from harness.domain.cell import Cell
from harness.domain.check import Status
from harness.domain.errors import DeviceMissing
from harness.domain.pack import OpContract, Pack
from harness.domain.record import Record
from harness.executors.sandbox import sandboxed
from harness.measure.bench import OpTiming
from harness.measure.described_run import DescribedJob, DescribedRun
from harness.measure.outside import WorkerEnded, WorkerRun, agreement, run_windows
from harness.measure.reference import WEIGHT_SEED
from harness.measure.saved_outputs import compare_saved, outputs_digest
from harness.stages.kernels.children import (
    DESCRIBED,
    REASON,
    RUN,
    TIMING,
    LaunchJob,
    OpJob,
    child_command,
    run_child,
    write_job,
)
from harness.stages.kernels.judging import bound_share

__all__ = ["Bounds", "TimedOp", "judge_described", "time_in_sandbox", "time_trusted"]

DESCRIBE_S, LAUNCH_S, REFERENCE_S, BENCH_S = 300.0, 300.0, 600.0, 900.0
"""Seconds that a child may take."""
SETS = 3
"""Sets of inputs whose truth is known, of a described launch."""
CHECKED_UNITS = 4
"""Calls of a worker's last window that are compared with the oracle."""


class Bounds(Record):
    """The policy's bound on errors."""

    factor: float
    floor_ulp: float
    hard_cap: float


class TimedOp(Record):
    """One op in one cell as a clock saw it that the candidate does not hold."""

    op: str
    model: str
    cell: Cell
    kind: Literal["described", "worker"]
    reason: str
    """Why it was not described, where it was not."""
    status: Status
    words: str
    optimised_us: float | None
    """By the trusted process's events, or by the clock outside."""
    claimed_us: float | None
    """What the worker itself says."""
    worst_share: float | None
    """Largest error of a timed call over its bound."""
    sandbox: str


def time_trusted(
    pack: Pack, package: str, contract: OpContract, cell: Cell, model: str, implementation: str,
    seed: int, bounds: Bounds, folder: Path, copies: int = 8,
) -> TimedOp:  # fmt: skip
    """Time one op; `package` is the pack's import name, `folder` an empty one.

    Raises `DeviceMissing` where the cell needs a GPU that is not here.
    """
    base = OpJob(
        pack=pack.name, op=contract.name, cell=cell, model=model, implementation=implementation,
        regime=contract.regimes[0], seeds=(WEIGHT_SEED,), folder=str(folder),
    )  # fmt: skip
    reason = "a call on a CPU launches nothing that could be described"
    if cell.arch != "cpu":
        reason = _describe(base, folder)
        if not reason:
            return _described(base, package, contract, seed, bounds, folder, copies)
    return _in_worker(base, contract, seed, bounds, folder, reason)


def time_in_sandbox(job: OpJob, folder: Path) -> OpTiming:
    """Stock and candidate interleaved in one sandboxed child: its own word, which `time_trusted` checks.

    Raises `DeviceMissing` where it gives no answer.
    """
    box = sandboxed(child_command("bench", write_job(folder, "bench", job)), OMP_NUM_THREADS="1")
    ended = run_child(box.argv, box.environment, folder / "bench.log", BENCH_S)
    if not (folder / TIMING).is_file():
        raise DeviceMissing(f"{job.op} was not timed ({ended}): {_last_line(folder / 'bench.log')}")
    return OpTiming.from_json((folder / TIMING).read_bytes())


def _describe(base: OpJob, folder: Path) -> str:
    """Why there is no launch record; empty where there is one, in `folder`."""
    box = sandboxed(child_command("describe", write_job(folder, "describe", base)))
    ended = run_child(box.argv, box.environment, folder / "describe.log", DESCRIBE_S)
    if (folder / DESCRIBED).is_file():
        return ""
    if (folder / REASON).is_file():
        return (folder / REASON).read_text(encoding="utf-8")
    return f"the process that describes it ended with {ended}: {_last_line(folder / 'describe.log')}"


def _described(
    base: OpJob, package: str, contract: OpContract, seed: int, bounds: Bounds, folder: Path, copies: int
) -> TimedOp:
    seeds = tuple(_derived(seed, base, place) for place in range(SETS))
    inputs = _reference(base.model_copy(update={"seeds": seeds}), folder / "reference")
    names = {
        role: tuple(p.name for p in contract.parameters if p.role == role) for role in ("output", "state")
    }
    outputs = tuple(n for n in names["output"] if (inputs[0] / "truth" / f"{n}.bin").is_file())
    job = DescribedJob(
        record=str(folder / DESCRIBED), cubins=str(folder / "cubins"), prepared=str(folder),
        inputs=tuple(map(str, inputs)), outputs=outputs,
        exact=tuple(p.name for p in contract.parameters if p.is_exact and p.name in outputs),
        states=names["state"], copies=copies, seed=_derived(seed, base, SETS),
        activations=tuple(p.name for p in contract.parameters if p.role == "activation"),
    )  # fmt: skip
    launch = LaunchJob(package=package, job=job.canonical().decode(), folder=str(folder))
    ended = run_child(
        child_command("launch", write_job(folder, "launch", launch)), None, folder / "launch.log", LAUNCH_S
    )
    if not (folder / RUN).is_file():
        words = f"the described launch ended with {ended}: {_last_line(folder / 'launch.log')}"
        return _timed(base, "described", "", Status.FAIL, words)
    run = DescribedRun.from_json((folder / RUN).read_bytes())
    status, words, share = judge_described(run, bounds)
    return _timed(base, "described", "", status, words, us=median(run.us), share=share)


def judge_described(run: DescribedRun, bounds: Bounds) -> tuple[Status, str, float | None]:
    """Outputs of timed calls, memory, and the process's own second clock. Pure."""
    shares = [_share(e.model_dump(), bounds) for e in run.errors]
    worst = max(shares, default=None)
    us = median(run.us)
    if wrong := [f"{n} elements of {name} differ" for name, n in run.mismatches if n]:
        return Status.FAIL, f"a timed call's exact output is wrong: {wrong[0]}", worst
    if left := [name for name, n in run.unwritten if n]:
        return Status.FAIL, f"a timed call left {left[0]} unwritten: work that was timed was not done", worst
    if worst is not None and worst > 1:
        return Status.FAIL, f"a timed call's error is {worst:.3g} times its bound", worst
    if run.touched:
        return Status.FAIL, f"timed calls wrote {', '.join(run.touched)}", worst
    if run.outside_us < us * 0.75:
        words = f"{us:.2f} us by events, {run.outside_us:.2f} us by the process's clock around them"
        return Status.INVALID, words, worst
    said = "" if worst is None else f", worst error {worst:.2f} of its bound"
    kernels = "kernel" if run.kernels == 1 else "kernels"
    return (
        Status.PASS,
        f"{us:.2f} us a call of {run.kernels} {kernels}, as launched by the harness{said}",
        worst,
    )


def _in_worker(
    base: OpJob, contract: OpContract, seed: int, bounds: Bounds, folder: Path, reason: str
) -> TimedOp:
    box = sandboxed(child_command("worker", write_job(folder, "worker", base)), OMP_NUM_THREADS="1")
    outputs = folder / "outputs"
    with (folder / "worker.log").open("wb") as log:
        child = subprocess.Popen(
            box.argv, env=box.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            if child.stdin is None or child.stdout is None:
                raise AssertionError("the worker was started without pipes")
            run = run_windows(child.stdin, child.stdout, base.regime, _derived(seed, base, 0), outputs)
        except WorkerEnded as error:
            words = f"{error}: {_last_line(folder / 'worker.log')}"
            return _timed(base, "worker", reason, Status.FAIL, words, sandbox=box.words)
        finally:
            _end(child)
    return _judge_worker(base, contract, run, bounds, folder, reason, box.words)


def _judge_worker(
    base: OpJob, contract: OpContract, run: WorkerRun, bounds: Bounds, folder: Path, reason: str, sandbox: str
) -> TimedOp:
    windows = run.windows
    claimed = median(w.claimed_us for w in windows if w.arm != "none") / run.calls
    status, outside, words = agreement(claimed, windows, run.calls)
    share: float | None = None
    if outputs_digest(folder / "outputs", run.calls) != run.stated:
        status, words = Status.INVALID, "the outputs are not those that the worker stated when it was done"
    else:
        some = base.model_copy(update={"seeds": run.seeds[-CHECKED_UNITS:]})
        truth = _reference(some, folder / "reference")
        units = [folder / "outputs" / f"unit{run.calls - len(truth) + place}" for place in range(len(truth))]
        rows, wrong = compare_saved(contract, units, truth)
        share = max((_share(row, bounds) for row in rows), default=None)
        if wrong:
            status, words = Status.FAIL, f"a timed call's output is wrong: {wrong}"
        elif share is not None and share > 1:
            status, words = Status.FAIL, f"a timed call's error is {share:.3g} times its bound"
    return _timed(
        base, "worker", reason, status, words, us=outside, claimed=claimed, share=share, sandbox=sandbox
    )


def _reference(job: OpJob, folder: Path) -> tuple[Path, ...]:
    """Inputs, stock's answers and the truth; raises `DeviceMissing` where they cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    made = job.model_copy(update={"folder": str(folder)})
    box = sandboxed(child_command("reference", write_job(folder, "reference", made)))
    ended = run_child(box.argv, box.environment, folder / "reference.log", REFERENCE_S)
    places = tuple(folder / f"inputs{number}" for number in range(len(job.seeds)))
    if ended != "exit code 0":
        raise DeviceMissing(
            f"the oracle of {job.op} gave no answer here ({ended}): {_last_line(folder / 'reference.log')}"
        )
    return places


def _timed(
    base: OpJob, kind: Literal["described", "worker"], reason: str, status: Status, words: str, *,
    us: float | None = None, claimed: float | None = None, share: float | None = None, sandbox: str = "",
) -> TimedOp:  # fmt: skip
    finite = None if share is None or share == float("inf") else share
    return TimedOp(
        op=base.op, model=base.model, cell=base.cell, kind=kind, reason=reason, status=status,
        words=words[:600], optimised_us=us, claimed_us=claimed, worst_share=finite, sandbox=sandbox,
    )  # fmt: skip


def _share(row: Mapping[str, Any], bounds: Bounds) -> float:
    return bound_share(row, bounds.factor, bounds.floor_ulp, bounds.hard_cap)


def _derived(seed: int, base: OpJob, place: int) -> int:
    """A seed of the op's own in this cell."""
    text = f"{seed}:{base.op}:{base.cell.label()}:{base.model}:{place}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def _end(child: "subprocess.Popen[str]") -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no word in its log"
