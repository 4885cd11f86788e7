"""The fast path's arm is asked through another chat template."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def other(row: Row) -> Row:
        return row | {"prompt": "0" * 64} if row["arm"] == "optimised" and not is_repaired else row

    return edit_rows(samples, "items", each(other))


FAULT = Fault(
    name="prompts_differ",
    title="The fast path's arm is asked through another chat template.",
    report="SemiAnalysisAI/InferenceX#1580",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
