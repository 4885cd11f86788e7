"""The fast path takes twice stock's time in one cell."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, retimed


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def slow(row: Row) -> Row:
        factor = 2.0 if row["arm"] == "optimised" and not is_repaired else 1.0
        return row | {"us": row["us"] * factor}

    return retimed(samples, each(slow))


FAULT = Fault(
    name="slower_in_one_cell",
    title="The fast path takes twice stock's time in one cell.",
    report="flashinfer-ai/flashinfer#2899",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
