"""A figure of a finished bundle is made better, and every digest is made to fit again."""

from pathlib import Path

from harness.domain.check import Outcome
from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.evidence.tampering import edit_outcomes


def better(outcome: Outcome, factor: float) -> Outcome:
    figures = tuple(
        f.model_copy(update={"value": f.value * factor}) if f.name == "optimised_mean_kl" and f.value else f
        for f in outcome.figures
    )
    return outcome.model_copy(update={"figures": figures})


def edit(folder: Path, is_repaired: bool) -> None:
    edit_outcomes(folder, lambda outcome: better(outcome, 1.0 if is_repaired else 0.5))


FAULT = Fault(
    name="figure_edited",
    title="A figure of a finished bundle is made better, and every digest is made to fit again.",
    report="SemiAnalysisAI/InferenceX#1580",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
