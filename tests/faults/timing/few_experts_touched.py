"""The bench draws the same token for every request, so eighteen experts are read where Zipf would read 350."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def fewer(row: Row) -> Row:
        return row if is_repaired else row | {"us": row["us"] * 0.6}

    return edit_rows(samples, "timings", each(fewer))


FAULT = Fault(
    name="few_experts_touched",
    title="The bench draws the same token for every request, so eighteen experts are read where Zipf would read 350.",
    report="flashinfer-ai/flashinfer#3622",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
    gap="the samples of a decode step hold no histogram of experts",
)
