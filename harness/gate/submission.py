"""A bundle as the gate takes it: verified first, then planned and judged by the gate itself.

Invariant: of a bundle the gate takes the samples alone. Which checks they must answer, and what they answer,
it finds out with its own planner and judges, whatever the bundle says of either.
"""

from dataclasses import dataclass
from pathlib import Path

from harness.domain.bundle import BundleState, Verification
from harness.domain.check import Check, Outcome, Status
from harness.domain.claim import Claim
from harness.domain.plan import Plan
from harness.evidence.verify import Rejudge, Replan, examine

__all__ = ["Submission", "load_submission"]

SOUND = frozenset({BundleState.VERIFIED, BundleState.UNCONFIRMED})


@dataclass(frozen=True, slots=True)
class Submission:
    """One bundle handed in. `plan` is None where it could not be read."""

    name: str
    verification: Verification
    plan: Plan | None
    outcomes: tuple[Outcome, ...]
    """As judged here; as stored only where there are no samples to judge. Empty for an unsound bundle."""
    asked: tuple[Check, ...] | None = None
    """What the planner here asks of the same claim, policy, change and machine; None where it cannot tell."""
    claim: Claim | None = None
    """The claim in force in the pack installed here, where that is known."""
    has_other_pack: bool = False
    """Whether the pack installed here is another than the plan names."""
    other_change: str = ""
    """How the repository's change differs from the plan's, where somebody looked; empty where it does not."""

    @property
    def is_sound(self) -> bool:
        """Whether its evidence can be judged at all."""
        return self.verification.state in SOUND and self.plan is not None


def load_submission(
    folder: Path,
    rejudge: Rejudge,
    replan: Replan | None = None,
    name: str | None = None,
    trusted_root: Path | None = None,
) -> Submission:
    """Verify and read one bundle. A broken one gives a submission without a plan, never an error. Without
    `replan` its evidence cannot count.
    """
    verification, work = examine(folder, rejudge, replan, trusted_root)
    shown, plan, again, judged = name or folder.name, work.plan, work.replanned, work.judged
    if plan is None or any(s.name == "schemas" and s.problems for s in verification.steps):
        return Submission(shown, verification, None, ())
    outcomes = tuple(
        judged.get(o.check, o) for o in work.outcomes if o.check in judged or o.status is Status.SKIPPED
    )
    return Submission(
        shown,
        verification,
        plan,
        outcomes if verification.state in SOUND else (),
        asked=again.checks if again else None,
        claim=again.claim if again else None,
        has_other_pack=bool(again and again.pack != plan.pack_digest),
    )
