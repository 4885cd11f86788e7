"""Times of a MoE step are given without the experts that it touched."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def left_out(row: Row) -> Row | None:
        return row if is_repaired or row["arm"] != "optimised" else None

    return edit_rows(samples, "experts", each(left_out))


FAULT = Fault(
    name="no_histogram_of_experts",
    title="Times of a MoE step are given without the experts that it touched.",
    report="sgl-project/sglang#25571",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b8.c64", edit),
)
