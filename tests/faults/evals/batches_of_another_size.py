"""The fast path's arm is asked one by one, and stock eight at once."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def alone(row: Row) -> Row:
        return row | {"batch": 1} if row["arm"] == "optimised" and not is_repaired else row

    return edit_rows(samples, "items", each(alone))


FAULT = Fault(
    name="batches_of_another_size",
    title="The fast path's arm is asked one by one, and stock eight at once.",
    report="vllm-project/vllm#51187",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
