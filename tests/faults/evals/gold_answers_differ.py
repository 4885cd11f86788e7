"""The two arms are scored against different revisions of the data set."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def other(row: Row) -> Row:
        is_it = row["arm"] == "optimised" and not is_repaired
        return row | {"target": row["answer"], "context": row["context"] + 1} if is_it else row

    return edit_rows(samples, "items", each(other))


FAULT = Fault(
    name="gold_answers_differ",
    title="The two arms are scored against different revisions of the data set.",
    report="openai/mrcr (dataset card, 5 December 2025)",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
