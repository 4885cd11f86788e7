"""The timer of the fast path's arm runs at a hundredth of its speed."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def scaled(row: Row) -> Row:
        return row | {"us": row["us"] / 100} if row["arm"] == "optimised" and not is_repaired else row

    return edit_rows(samples, "timings", each(scaled))


FAULT = Fault(
    name="clock_runs_slow",
    title="The timer of the fast path's arm runs at a hundredth of its speed.",
    report="karpathy/llm.c#851",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
