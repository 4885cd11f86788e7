"""The timer tells the fast path's steps a third shorter, by less than what a word takes on its way."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def shorter(row: Row) -> Row:
        return row | {"us": row["us"] * 0.67} if row["arm"] == "optimised" and not is_repaired else row

    return edit_rows(samples, "timings", each(shorter))


FAULT = Fault(
    name="short_steps_told_short",
    title="The timer tells the fast path's steps a third shorter, by less than what a word takes on its way.",
    report="karpathy/llm.c#851",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
