"""The ledger of the eval shows that the fast path's arm ran stock."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def stock(row: Row) -> Row:
        is_it = row["arm"] == "optimised" and row["phase"] == "decode" and not is_repaired
        told = {"path": "stock", "reason": "phase_not_claimed"}
        return row | {name: told[name] for name in told if name in row} if is_it else row

    return edit_rows(edit_rows(samples, "steps", each(stock)), "cells", each(stock))


FAULT = Fault(
    name="judged_on_the_stock_path",
    title="The ledger of the eval shows that the fast path's arm ran stock.",
    report="vllm-project/vllm#46142",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/drift", edit),
)
