"""Neither arm solves the task, so being equal says nothing."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def wrong(row: Row) -> Row:
        return row if is_repaired else row | {"answer": "1"}

    return edit_rows(samples, "items", each(wrong))


FAULT = Fault(
    name="model_too_weak_to_tell",
    title="Neither arm solves the task, so being equal says nothing.",
    report="vllm-project/vllm#46142",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
