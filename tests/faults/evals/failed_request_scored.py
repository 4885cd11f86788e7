"""A request that failed is scored as a wrong answer, so a crash reads as a low score."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def fail(row: Row) -> Row:
        is_it = row["arm"] == "optimised" and row["item"].endswith("-1") and not is_repaired
        return row | {"answer": "", "finish": "error"} if is_it else row

    return edit_rows(samples, "items", each(fail))


FAULT = Fault(
    name="failed_request_scored",
    title="A request that failed is scored as a wrong answer, so a crash reads as a low score.",
    report="vllm-project/vllm#57716",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
