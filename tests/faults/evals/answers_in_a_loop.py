"""The fast path repeats itself to the token limit, which a score reads as wrong answers."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def repeat(row: Row) -> Row:
        is_it = row["arm"] == "optimised" and not is_repaired
        return row | {"answer": " ".join(["211", "212", "213"] * 40), "finish": "length"} if is_it else row

    return edit_rows(samples, "items", each(repeat))


FAULT = Fault(
    name="answers_in_a_loop",
    title="The fast path repeats itself to the token limit, which a score reads as wrong answers.",
    report="vllm-project/vllm#52383",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
