"""Several bundles for one pull request, taken together: for each check the strongest evidence.

Which checks there are is the gate's own plan, never a bundle's: a check that a bundle leaves out, or asks
otherwise, is required all the same, and open unless another bundle answers it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.domain.cell import Arch
from harness.domain.change import Sha
from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.domain.verdict import Contradiction, Contribution, StaleEvidence
from harness.evidence.replanning import is_same_question
from harness.gate.demands import architecture_of
from harness.gate.freshness import Move, why_stale
from harness.gate.submission import Submission
from harness.planner import claim_or_best

__all__ = [
    "Evidence",
    "Head",
    "Merged",
    "Open",
    "contradictions",
    "counted_tier",
    "merge",
    "stale_evidence",
    "strongest",
]


@dataclass(frozen=True, slots=True)
class Head:
    """The head that is judged, and by bundle head what changed since."""

    sha: Sha
    moves: Mapping[Sha, Move]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One outcome of one counted bundle."""

    bundle: str
    check: Check
    arch: Arch | None
    outcome: Outcome
    stale: str | None
    """Why the judged head invalidates it; None for fresh evidence."""
    tier: Tier
    """What it counts as: the run's tier, or what its machine can give where that is less."""


@dataclass(frozen=True, slots=True)
class Open:
    """A check that the gate asks and that no counted bundle answers as asked."""

    check: Check
    arch: Arch | None
    why: str


Key = tuple[str, Arch | None]


@dataclass(frozen=True, slots=True)
class Merged:
    """Evidence by (check id, architecture): one id asks the same of every architecture that ran it."""

    evidence: Mapping[Key, Sequence[Evidence]]
    open: Sequence[Open]


def merge(submissions: Sequence[Submission], head: Head, foreign_rules: frozenset[str]) -> Merged:
    """All evidence about each required check, in plan order of the first bundle that should plan it.

    `foreign_rules` names bundles whose zones or rules are not the gate's: their isolation counts for nothing.
    """
    found: dict[Key, list[Evidence]] = {}
    lacking: dict[Key, Open] = {}
    for submission in submissions:
        plan = submission.plan
        if plan is None or submission.asked is None:
            continue
        planned = {c.id: c for c in plan.checks}
        outcomes = {o.check: o for o in submission.outcomes}
        for check in submission.asked:
            if not check.is_required:
                continue
            key = (check.id, architecture_of(check, plan))
            why = ""
            if check.stage is StageName.ISOLATION and submission.name in foreign_rules:
                why = "judged by other zones or rules than this gate's"
            elif check.id not in planned:
                why = "left out of the plan"
            elif not is_same_question(planned[check.id], check, plan.policy):
                why = "planned as another question"
            elif check.id not in outcomes:
                why = "not to be judged by this harness"
            if why:
                lacking[key] = Open(check, key[1], f"{why} ({submission.name})")
                continue
            is_moved = plan.change.head != head.sha
            stale = why_stale(check, head.moves.get(plan.change.head)) if is_moved else None
            found.setdefault(key, []).append(
                Evidence(submission.name, check, key[1], outcomes[check.id], stale, counted_tier(plan))
            )
    return Merged(found, tuple(entry for key, entry in lacking.items() if key not in found))


def counted_tier(plan: Plan) -> Tier:
    """The tier of a run, or what its machine can give where that is less."""
    return min(plan.tier, claim_or_best(plan.machine, plan.claim), key=lambda tier: tier.strength)


def strongest(evidence: Sequence[Evidence]) -> Evidence:
    """The evidence that counts: fresh before stale, run before SKIPPED, then the strongest tier; a PASS only
    before weaker answers of its own tier.
    """
    return max(
        evidence,
        key=lambda e: (
            e.stale is None,
            e.outcome.status is not Status.SKIPPED,
            e.tier.strength,
            e.outcome.status is Status.PASS,
        ),
    )


def contradictions(merged: Merged) -> tuple[Contradiction, ...]:
    """Checks that pass in one bundle and fail in another, both of the judged head."""
    found = []
    for (check, _), evidence in merged.evidence.items():
        fresh = [e for e in evidence if e.stale is None]
        if {Status.PASS, Status.FAIL} <= {e.outcome.status for e in fresh}:
            contributions = tuple(
                Contribution(bundle=e.bundle, tier=e.tier, status=e.outcome.status) for e in fresh
            )
            found.append(Contradiction(check=check, contributions=contributions))
    return tuple(found)


def stale_evidence(merged: Merged) -> tuple[StaleEvidence, ...]:
    """Checks that have no fresh evidence, each with the reason of its strongest."""
    found = []
    for (check, _), evidence in merged.evidence.items():
        best = strongest(evidence)
        if best.stale is not None and best.outcome.status is not Status.SKIPPED:
            cell = None if best.check.cell is None else best.check.cell.label()
            found.append(StaleEvidence(check=check, cell=cell, bundle=best.bundle, why=best.stale))
    return tuple(found)
