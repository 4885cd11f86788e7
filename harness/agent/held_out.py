"""Checks that an agent sees, and others that it does not.

The public ones are the plan's, from a seed that the agent is told. The held-out ones are drawn for each
attempt from the system's own randomness: cells of the envelope between its edges, all input regimes, seeds of
their own. They exist only in the judge's memory and in the job of the process that runs the candidate, after
its files were taken. What comes back is whether all passed, and the kind of the first failure; so nothing can
be fitted to them.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.agent.commands import tree_variables
from harness.agent.samplers import SampleJob, sample_command
from harness.domain.cell import Cell
from harness.domain.check import Check, Outcome, Samples, Severity, Status
from harness.domain.claim import Envelope
from harness.domain.journal import HeldOut
from harness.domain.stage import PlanRequest
from harness.executors.asked_child import AskedChild, ChildEnded
from harness.executors.confinement import Limits, confined
from harness.stages import kernels
from harness.tuning.desk import op_checks

__all__ = ["Bench", "draw_checks", "kind_of", "public_checks", "run_checks", "summed_up"]

SMOKE_MOST = {"batch": 8, "context": 400}
"""On a CPU, of held-out cells."""
CHECK_S = 120.0


class Bench:
    """Where a candidate's checks run: one confined process over its tree, started again when it was lost.

    Use as a context manager.
    """

    def __init__(self, pack: str, policy: str, tree: Path, scratch: Path, *, has_gpu: bool) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        job = scratch / "sample.job.json"
        job.write_bytes(SampleJob(pack=pack, policy=policy).canonical())
        self._box = confined(sample_command(job), scratch, Limits(), tree_variables(tree), has_gpu=has_gpu)
        self._log = scratch / "samples.log"
        self._child: AskedChild | None = None

    @property
    def words(self) -> str:
        """What the process lacks and has."""
        return self._box.words

    def outcome(self, check: Check) -> Outcome:
        """The check's outcome; a candidate that crashes or hangs fails it."""
        if self._child is None:
            self._child = AskedChild(self._box, self._log)
        try:
            answer = self._child.ask({"check": check.model_dump(mode="json")}, CHECK_S)
            return kernels.judge(check, Samples.model_validate(answer["samples"]))
        except (ChildEnded, KeyError, ValueError) as error:
            self.close()
            return _ended(check, error)

    def close(self) -> None:
        """End the process and all that it started."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def public_checks(request: PlanRequest, op: str, implementation: str) -> tuple[Check, ...]:
    """What the plan asks of the op on this machine."""
    return op_checks(request, op, implementation)


def draw_checks(
    request: PlanRequest, op: str, implementation: str, count: int, source: random.Random
) -> tuple[Check, ...]:
    """Checks in cells between the envelope's edges, in every regime, with seeds of their own."""
    planned = [c for c in op_checks(request, op, implementation) if c.cell is not None]
    contract = next(o for o in request.pack.ops() if o.name == op)
    found: dict[str, Check] = {}
    for _ in range(20 * count):
        if len(found) == count or not planned:
            break
        base = source.choice(planned)
        if base.cell is None:
            continue
        cell = _between(base.cell, request.claim.envelope, source)
        if not request.claim.envelope.admits(cell):
            continue
        parameters = dict(base.parameters) | {
            "seed": source.getrandbits(31),
            "regimes": ",".join(contract.regimes),
        }
        check_id = f"{base.id.rpartition('/')[0]}/{cell.label()}"
        found[check_id] = base.model_copy(
            update={"id": check_id, "cell": cell, "parameters": tuple(parameters.items())}
        )
    return tuple(found.values())


def run_checks(
    bench: Bench, checks: Sequence[Check], on_check: Callable[[int, int, str], None] | None = None,
    *, is_first_enough: bool = False,
) -> tuple[Outcome, ...]:  # fmt: skip
    """Outcomes in order; up to the first that is no PASS where that is enough."""
    outcomes: list[Outcome] = []
    for number, check in enumerate(checks, 1):
        if on_check is not None:
            on_check(number, len(checks), check.id)
        outcomes.append(bench.outcome(check))
        if is_first_enough and outcomes[-1].status is not Status.PASS:
            break
    return tuple(outcomes)


def summed_up(outcomes: Sequence[Outcome], count: int) -> HeldOut:
    """Pass or fail, and the kind of the first failure: neither cell nor figure."""
    bad = next((o for o in outcomes if o.status is not Status.PASS), None)
    return HeldOut(is_passed=bad is None, kind="" if bad is None else kind_of(bad), checks=count)


def kind_of(outcome: Outcome) -> str:
    """A word for how an outcome failed."""
    if outcome.summary.startswith(CRASHED):
        return "hung" if "no answer after" in outcome.summary else "crashed"
    rules = [f.rule for f in outcome.findings if f.severity is Severity.ERROR]
    return rules[0] if rules else outcome.status.value.lower()


CRASHED = "the candidate's process"


def _ended(check: Check, error: Exception) -> Outcome:
    how = error.how if isinstance(error, ChildEnded) else "gave samples that are none"
    return Outcome(
        check=check.id, status=Status.FAIL, tier=check.tier, summary=f"{CRASHED}: {how}"[:600],
        next_step="call the op in this cell under a debugger; mend what ends the process",
    )  # fmt: skip


def _between(cell: Cell, envelope: Envelope, source: random.Random) -> Cell:
    """A cell like this one with another batch and context."""
    is_cpu = cell.arch == "cpu"
    most_batch = min(envelope.batch.max, SMOKE_MOST["batch"]) if is_cpu else envelope.batch.max
    most_context = (
        min(envelope.context.max, SMOKE_MOST["context"]) if is_cpu else min(envelope.context.max, 8192)
    )
    batch = source.randint(envelope.batch.min, most_batch)
    least = max(envelope.context.min, cell.drafts + 1)
    return cell.model_copy(update={"batch": batch, "context": source.randint(least, most_context)})
