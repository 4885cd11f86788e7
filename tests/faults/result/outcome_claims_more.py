"""An outcome claims more than its samples give, and the digests are made to fit."""

from pathlib import Path

from harness.domain.check import Outcome
from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.evidence.tampering import edit_outcomes


def shorter(outcome: Outcome, is_repaired: bool) -> Outcome:
    words = outcome.summary if is_repaired else f"{outcome.summary}, and faster"
    return outcome.model_copy(update={"summary": words})


def edit(folder: Path, is_repaired: bool) -> None:
    edit_outcomes(folder, lambda outcome: shorter(outcome, is_repaired))


FAULT = Fault(
    name="outcome_claims_more",
    title="An outcome claims more than its samples give, and the digests are made to fit.",
    report="ScalingIntelligence/KernelBench#82",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
