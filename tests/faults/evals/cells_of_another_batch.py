"""An eval's tokens are booked under a batch that the policy asks for and no step had."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def grown(row: Row) -> Row:
        return row | {"requests": row["requests"] * (1 if is_repaired else 8)}

    return edit_rows(samples, "cells", each(grown))


FAULT = Fault(
    name="cells_of_another_batch",
    title="An eval's tokens are booked under a batch that the policy asks for and no step had.",
    report="vllm-project/vllm#51187",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
