"""Two versions of an op against each other, each in a confined worker, by a clock that neither holds.

Windows of both alternate in ABBA order, each on inputs of a seed drawn now; windows without calls say what a
window costs by itself. The outputs of the second version's last window are compared with the oracle of the
*trusted* tree, in a process that runs when no candidate runs any more; the first one's were when it was
proved. As in `stages/kernels/timing`, a worker whose own times disagree with the clock outside proves
nothing.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.agent.commands import tree_variables
from harness.domain.check import Check, Status
from harness.domain.errors import EvidenceError
from harness.domain.pack import OpContract, Pack
from harness.domain.tuning import Comparison
from harness.executors.asked_child import AskedChild, ChildEnded
from harness.executors.confinement import Limits, confined
from harness.measure.outside import TOLERANCE
from harness.measure.reference import WEIGHT_SEED
from harness.measure.saved_outputs import compare_saved, outputs_digest
from harness.stages.kernels.children import OpJob, child_command, run_child, write_job
from harness.stages.kernels.judging import bound_share
from harness.tuning.comparison import compared

__all__ = ["Entrant", "RaceResult", "race"]

WINDOW_US, CALLS, MAX_CALLS = 20_000.0, 4, 512
ASK_S, REFERENCE_S = 120.0, 300.0
CHECKED_UNITS = 2
"""Calls of the last window that are compared with the oracle."""


class Entrant(NamedTuple):
    """One version of the op."""

    tree: Path
    arm: str
    """`optimised`, or `stock`."""


class RaceResult(NamedTuple):
    """What came of a race."""

    status: Status
    words: str
    speed: Comparison | None
    first_us: tuple[float, ...]
    second_us: tuple[float, ...]


class _Worker:
    """One entrant's worker."""

    def __init__(self, entrant: Entrant, job: OpJob, folder: Path, *, has_gpu: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.arm, self.folder = entrant.arm, folder
        command = child_command("worker", write_job(folder, "worker", job))
        box = confined(command, folder, Limits(), tree_variables(entrant.tree), has_gpu=has_gpu)
        self.child = AskedChild(box, folder / "worker.log")
        self.claimed: list[float] = []
        self.seeds: list[int] = []
        self.stated = ""
        self.calls = CALLS
        """Of one window."""
        self.empty: list[float] = []
        """Windows without calls."""

    @property
    def doubt_us(self) -> float:
        """What three of four windows without calls waver by, a call; the rest are lost among pairs."""
        return (sorted(self.empty)[len(self.empty) * 3 // 4] - min(self.empty)) / self.calls

    def window(self, arm: str, regime: str, seeds: list[int]) -> float:
        """Microseconds of one window by the clock here."""
        self._did({"do": "arm", "arm": arm, "regime": regime, "seeds": seeds})
        begun = time.perf_counter_ns()
        answer = self._did({"do": "go"})
        outside = (time.perf_counter_ns() - begun) / 1e3
        if arm != "none":
            self.claimed.append(float(answer["us"]))
            self.seeds, self.stated = seeds, str(answer["digest"])
        return outside

    def save(self) -> Path:
        """The last window's outputs."""
        self._did({"do": "save", "folder": str(self.folder / "outputs")})
        return self.folder / "outputs"

    def _did(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = dict(self.child.ask(request, ASK_S))
        if answer.get("did") != request["do"]:
            raise ChildEnded(f"gave no answer to {request['do']!r}", "")
        return answer


def race(
    pack: Pack, check: Check, trusted: Path, first: Entrant, second: Entrant, folder: Path, *,
    blocks: int, alpha: float, source: random.Random, has_gpu: bool,
) -> RaceResult:  # fmt: skip
    """First time over second time in the check's cell; a PASS says that times and outputs can be believed."""
    contract = next(o for o in pack.ops() if o.name == check.op)
    if check.cell is None:
        raise AssertionError(f"{check.id} was planned without a cell")
    regime = contract.regimes[0]
    base = OpJob(
        pack=pack.name, op=contract.name, cell=check.cell, model=str(check.parameter("model")),
        implementation=str(check.parameter("implementation")), regime=regime, seeds=(WEIGHT_SEED,),
        folder=str(folder),
    )  # fmt: skip
    names, entrants = ("the best so far", "the candidate"), (first, second)
    workers: list[_Worker] = []
    try:
        for place, entrant in zip(("first", "second"), entrants, strict=True):
            job = base.model_copy(update={"folder": str(folder / place)})
            workers.append(_Worker(entrant, job, folder / place, has_gpu=has_gpu))
        times = _run_windows(workers, regime, blocks, source)
        workers[1].save()
    except (ChildEnded, KeyError, ValueError) as error:
        return RaceResult(Status.FAIL, f"a version ended while it was timed: {error}"[:600], None, (), ())
    finally:
        for worker in workers:
            worker.child.close()
    if short := [name for name, own in zip(names, times, strict=True) if min(own) <= 0]:
        words = f"calls of {short[0]} are too short to be seen from outside on this machine"
        return RaceResult(Status.INCONCLUSIVE, words, None, tuple(times[0]), tuple(times[1]))
    found = compared(times[0], times[1], alpha)
    for name, worker, own in zip(names, workers, times, strict=True):
        status, words = _believable(worker, own)
        if status is Status.PASS and worker is workers[1]:
            status, words = _right(contract, check, base, worker, trusted, folder / "truth")
        if status is not Status.PASS:
            return RaceResult(status, f"{name}: {words}", found, tuple(times[0]), tuple(times[1]))
    ends = f"{found.low:.3f} to {min(found.high, 999):.3f}"
    words = f"{found.ratio:.3f} times as fast ({ends} at level {alpha:.2g})"
    return RaceResult(Status.PASS, words, found, tuple(times[0]), tuple(times[1]))


def _run_windows(
    workers: Sequence[_Worker], regime: str, blocks: int, source: random.Random
) -> list[list[float]]:
    """Microseconds a call by entrant and block. Each has windows of its own length: some milliseconds."""

    def seeds(count: int) -> list[int]:
        return [source.getrandbits(31) for _ in range(count)]

    for worker in workers:
        worker.window(worker.arm, regime, seeds(CALLS))
        took = worker.window(worker.arm, regime, seeds(CALLS))
        worker.calls = max(CALLS, min(MAX_CALLS, round(WINDOW_US * CALLS / max(took, 1.0))))
    times: list[list[float]] = [[], []]
    for block in range(blocks):
        for place in (0, 1) if block % 2 == 0 else (1, 0):
            worker = workers[place]
            if block % 3 == 0:
                worker.empty.append(worker.window("none", regime, seeds(worker.calls)))
            times[place].append(worker.window(worker.arm, regime, seeds(worker.calls)))
    return [
        [(us - min(worker.empty)) / worker.calls for us in own]
        for worker, own in zip(workers, times, strict=True)
    ]


def _believable(worker: _Worker, outside_us: Sequence[float]) -> tuple[Status, str]:
    """Whether the two clocks can both be true: in the window that was disturbed least they must agree."""
    own = worker.claimed[2:]
    gap, claimed, outside = min(
        (abs(mine - theirs), mine, theirs) for mine, theirs in zip(own, outside_us, strict=True)
    )
    words = f"{claimed:.2f} us a call by its own clock, {outside:.2f} us by the one outside"
    if gap > TOLERANCE * max(claimed, outside) + worker.doubt_us:
        return Status.INVALID, f"{words}: they do not measure the same"
    if worker.doubt_us > max(claimed, outside):
        return Status.INCONCLUSIVE, f"{words}, +- {worker.doubt_us:.2f}: too short to be seen from outside"
    return Status.PASS, words


def _right(
    contract: OpContract, check: Check, base: OpJob, worker: _Worker, trusted: Path, folder: Path
) -> tuple[Status, str]:
    """Whether the timed calls' outputs are those that were stated, and right."""
    outputs = worker.folder / "outputs"
    if outputs_digest(outputs, worker.calls) != worker.stated:
        return Status.INVALID, "the outputs are not those that it stated when it was done"
    folder.mkdir(parents=True, exist_ok=True)
    asked = tuple(worker.seeds[-CHECKED_UNITS:])
    job = base.model_copy(update={"seeds": asked, "folder": str(folder)})
    command = child_command("reference", write_job(folder, "reference", job))
    box = confined(command, folder, Limits(), tree_variables(trusted), has_gpu=base.cell.arch != "cpu")
    ended = run_child(box.argv, box.environment, folder / "reference.log", REFERENCE_S)
    if ended != "exit code 0":
        return Status.NO_EVIDENCE, f"the oracle gave no answer ({ended})"
    truth = [folder / f"inputs{number}" for number in range(len(asked))]
    units = [outputs / f"unit{worker.calls - len(asked) + place}" for place in range(len(asked))]
    try:
        rows, wrong = compare_saved(contract, units, truth)
    except (EvidenceError, OSError) as error:
        return Status.FAIL, f"a timed call's output cannot be read: {error}"[:600]
    if wrong:
        return Status.FAIL, f"a timed call's output is wrong: {wrong}"
    bounds = [check.number(name) for name in ("factor", "floor_ulp", "hard_cap")]
    worst = max((bound_share(row, *bounds) for row in rows), default=0.0)
    if worst > 1:
        return Status.FAIL, f"a timed call's error is {worst:.3g} times its bound"
    return Status.PASS, f"worst error {worst:.2f} of its bound"
