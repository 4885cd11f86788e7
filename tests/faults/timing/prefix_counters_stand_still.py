"""The prefix cache's counters never rise, so nobody can tell whether a prompt was computed."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def still(row: Row) -> Row:
        return row if is_repaired else row | {"hits": 0, "reused_tokens": 0}

    return edit_rows(samples, "prefixes", each(still))


FAULT = Fault(
    name="prefix_counters_stand_still",
    title="The prefix cache's counters never rise, so nobody can tell whether a prompt was computed.",
    report="vllm-project/vllm#54360",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
