"""The mean over the text is fine, but the error grows with every token."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    last = max(row["position"] for row in samples.table("drift").records())

    def grow(row: Row) -> Row:
        share = 1.0 if is_repaired else 3.4 * (row["position"] / last) ** 4
        return row | {"kl": row["kl"] * share} if row["arm"] == "optimised" and row["kl"] else row

    return edit_rows(samples, "drift", each(grow))


FAULT = Fault(
    name="error_grows_with_context",
    title="The mean over the text is fine, but the error grows with every token.",
    report="vllm-project/vllm#47930",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/drift", edit),
)
