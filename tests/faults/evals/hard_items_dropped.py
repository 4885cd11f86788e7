"""Items that the fast path gets wrong are missing from its arm."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def drop(row: Row) -> Row | None:
        is_it = row["arm"] == "optimised" and row["item"].endswith("-1")
        return row if is_repaired or not is_it else None

    return edit_rows(samples, "items", each(drop))


FAULT = Fault(
    name="hard_items_dropped",
    title="Items that the fast path gets wrong are missing from its arm.",
    report="google-deepmind/eval_hub#8",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
