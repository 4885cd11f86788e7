"""A bundle as the gate takes it: verified first, then read."""

from dataclasses import dataclass
from pathlib import Path

from harness.domain.bundle import BundleState, Verification
from harness.domain.check import Outcome
from harness.domain.errors import EvidenceError, InputError
from harness.domain.plan import Plan
from harness.evidence.reader import open_bundle
from harness.evidence.verify import Rejudge, Replan, verify

__all__ = ["Submission", "load_submission"]


@dataclass(frozen=True, slots=True)
class Submission:
    """One bundle handed in. `plan` is None where it could not be read."""

    name: str
    verification: Verification
    plan: Plan | None
    outcomes: tuple[Outcome, ...]

    @property
    def is_sound(self) -> bool:
        """Whether its evidence can be judged at all."""
        return self.verification.state is BundleState.VERIFIED and self.plan is not None


def load_submission(
    folder: Path, rejudge: Rejudge, replan: Replan | None = None, name: str | None = None
) -> Submission:
    """Verify and read one bundle. A broken one gives a submission without a plan, never an error."""
    verification = verify(folder, rejudge, replan)
    shown = name or folder.name
    try:
        bundle = open_bundle(folder)
    except (EvidenceError, InputError):
        return Submission(shown, verification, None, ())
    return Submission(shown, verification, bundle.plan, bundle.outcomes)
