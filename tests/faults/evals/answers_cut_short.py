"""The fast path's answers end early, as its token limit counts drafts."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def cut(row: Row) -> Row:
        is_it = row["arm"] == "optimised" and not is_repaired
        return row | {"answer": " ".join(row["answer"].split()[:2]), "finish": "length"} if is_it else row

    return edit_rows(samples, "items", each(cut))


FAULT = Fault(
    name="answers_cut_short",
    title="The fast path's answers end early, as its token limit counts drafts.",
    report="vllm-project/vllm#39549",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
