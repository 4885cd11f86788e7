"""The timer tells the fast path's steps shorter, by less than what a word takes on its way, and by turns.

The amounts scatter as widely as their median, so that a limit which grows with their scatter excuses them.
"""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows

SHARES = (0.2, 0.0, 0.39, 0.2, 0.0, 0.39, 0.2)
"""What is left out of a step, block by block."""


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def shorter(row: Row) -> Row:
        if row["arm"] != "optimised" or is_repaired:
            return row
        return row | {"us": row["us"] * (1 - SHARES[row["block"] % len(SHARES)])}

    return edit_rows(samples, "timings", each(shorter))


FAULT = Fault(
    name="short_steps_told_short",
    title="The timer tells the fast path's steps shorter by turns, by less than what a word takes on its way.",
    report="karpathy/llm.c#851",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
