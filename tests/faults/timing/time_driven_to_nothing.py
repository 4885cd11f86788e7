"""One shape's time is driven to 1e-30, and a geometric mean follows it."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def nothing(row: Row) -> Row:
        return row | {"us": 1e-30} if row["arm"] == "optimised" and not is_repaired else row

    return edit_rows(samples, "timings", each(nothing))


FAULT = Fault(
    name="time_driven_to_nothing",
    title="One shape's time is driven to 1e-30, and a geometric mean follows it.",
    report="gpu-mode/reference-kernels#159",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
