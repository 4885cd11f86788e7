"""An item is asked again until its answer is right, and both answers are kept."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def retry(rows: list[Row]) -> list[Row]:
        again = [row for row in rows if row["arm"] == "optimised"][:2]
        return rows if is_repaired else rows + again

    return edit_rows(samples, "items", retry)


FAULT = Fault(
    name="answered_until_right",
    title="An item is asked again until its answer is right, and both answers are kept.",
    report="vllm-project/vllm#56644",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
