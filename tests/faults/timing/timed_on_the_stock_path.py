"""The sweep times stock under the fast path's name."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def stock(row: Row) -> Row:
        return row if is_repaired else row | {"path": "stock"}

    def total(rows: list[Row]) -> list[Row]:
        return list({(r["arm"], r["phase"], r["path"]): r for r in map(stock, rows)}.values())

    return edit_rows(samples, "steps", total)


FAULT = Fault(
    name="timed_on_the_stock_path",
    title="The sweep times stock under the fast path's name.",
    report="pytorch/pytorch#146554",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
