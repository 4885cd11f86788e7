"""Several bundles for one pull request, taken together: for each check the strongest evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.domain.cell import Arch
from harness.domain.change import Sha
from harness.domain.check import Check, Outcome, Status
from harness.domain.verdict import Contradiction, Contribution, StaleEvidence
from harness.gate.demands import architecture_of
from harness.gate.freshness import Move, why_stale
from harness.gate.submission import Submission

__all__ = ["Evidence", "Merged", "contradictions", "merge", "stale_evidence", "strongest"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One outcome of one counted bundle."""

    bundle: str
    check: Check
    arch: Arch | None
    outcome: Outcome
    stale: str | None
    """Why the judged head invalidates it; None for fresh evidence."""


Merged = Mapping[tuple[str, Arch | None], Sequence[Evidence]]
"""Evidence by (check id, architecture): one id asks the same of every architecture that ran it."""


def merge(submissions: Sequence[Submission], head: Sha, moves: Mapping[Sha, Move]) -> Merged:
    """All evidence about each required check, in plan order of the first bundle that plans it."""
    found: dict[tuple[str, Arch | None], list[Evidence]] = {}
    for submission in submissions:
        plan = submission.plan
        if plan is None:
            continue
        outcomes = {o.check: o for o in submission.outcomes}
        for check in plan.checks:
            if not check.is_required or check.id not in outcomes:
                continue
            is_moved = plan.change.head != head
            stale = why_stale(check, moves.get(plan.change.head)) if is_moved else None
            arch = architecture_of(check, plan)
            found.setdefault((check.id, arch), []).append(
                Evidence(submission.name, check, arch, outcomes[check.id], stale)
            )
    return found


def strongest(evidence: Sequence[Evidence]) -> Evidence:
    """The evidence that counts: fresh before stale, run before SKIPPED, then the strongest tier; a PASS only
    before weaker answers of its own tier.
    """
    return max(
        evidence,
        key=lambda e: (
            e.stale is None,
            e.outcome.status is not Status.SKIPPED,
            e.outcome.tier.strength,
            e.outcome.status is Status.PASS,
        ),
    )


def contradictions(merged: Merged) -> tuple[Contradiction, ...]:
    """Checks that pass in one bundle and fail in another, both of the judged head."""
    found = []
    for (check, _), evidence in merged.items():
        fresh = [e for e in evidence if e.stale is None]
        if {Status.PASS, Status.FAIL} <= {e.outcome.status for e in fresh}:
            contributions = tuple(
                Contribution(bundle=e.bundle, tier=e.outcome.tier, status=e.outcome.status) for e in fresh
            )
            found.append(Contradiction(check=check, contributions=contributions))
    return tuple(found)


def stale_evidence(merged: Merged) -> tuple[StaleEvidence, ...]:
    """Checks that have no fresh evidence, each with the reason of its strongest."""
    found = []
    for (check, _), evidence in merged.items():
        best = strongest(evidence)
        if best.stale is not None and best.outcome.status is not Status.SKIPPED:
            found.append(StaleEvidence(check=check, bundle=best.bundle, why=best.stale))
    return tuple(found)
