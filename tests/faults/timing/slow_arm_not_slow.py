"""The planted slow-down does not show in the times, so a slow fast path would not either."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, retimed


def edit(samples: Samples, is_repaired: bool) -> Samples:
    rows = samples.table("timings").records()
    stock = {row["block"]: row["us"] for row in rows if row["arm"] == "stock"}

    def same(row: Row) -> Row:
        return row | {"us": stock[row["block"]]} if row["arm"] == "slow" and not is_repaired else row

    return retimed(samples, each(same))


FAULT = Fault(
    name="slow_arm_not_slow",
    title="The planted slow-down does not show in the times, so a slow fast path would not either.",
    report="triton-lang/triton#8384",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
