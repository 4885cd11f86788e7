"""Both of two sweeps that are put side by side timed one build, so that noise passes for a gain."""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.domain.check import Figure, Outcome, StageName, Status
from harness.domain.faults import Sighting
from harness.domain.machine import Tier
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.stages.sweep.comparing import compare_sweeps


@dataclass(frozen=True, slots=True)
class ComparedScene:
    """`sweep compare` of two runs of one cell, the second of which looks a fifth faster."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """Whether the comparison is refused; the twin's second run is of another build."""
        plan = bench.plan(StageName.SWEEP)
        other = plan.model_copy(update={"pack_digest": "c" * 64}) if is_repaired else plan
        runs = [(p, (_timed(p.checks[0].id, us),)) for p, us in ((plan, 100.0), (other, 80.0))]
        found = compare_sweeps(*runs)
        status = Status.INVALID if found.obstacles else Status.PASS
        words = "; ".join(found.obstacles) or found.cells[0].words
        return (Sighting(column="sweep", subject="compare", status=status.value, words=words),)


def _timed(check: str, us: float) -> Outcome:
    figures = (
        Figure(name="stock_us", value=200.0), Figure(name="optimised_us", value=us),
        Figure(name="noise_floor", value=0.02),
        Figure(name="ratio", value=200 / us, low=198 / us, high=202 / us),
    )  # fmt: skip
    return Outcome(
        check=check, status=Status.FAIL, tier=Tier.SMOKE, summary="timed", next_step="none", figures=figures
    )


FAULT = Fault(
    name="one_build_compared_with_itself",
    title="Both of two sweeps that are put side by side timed one build, so that noise passes for a gain.",
    report="ClickHouse/ClickHouse#107468",
    target="timing",
    expected="sweep",
    scene=ComparedScene(),
)
