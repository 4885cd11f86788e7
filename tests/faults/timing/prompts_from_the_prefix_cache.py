"""The second arm finds its prompts in the prefix cache and looks twice as fast."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows, retimed


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def is_hit(row: Row) -> bool:
        return row["arm"] == "optimised" and not is_repaired

    def faster(row: Row) -> Row:
        return row | {"us": row["us"] * 0.54} if is_hit(row) else row

    def counted(row: Row) -> Row:
        return row | {"queries": 4, "hits": 4, "reused_tokens": 252} if is_hit(row) else row

    return edit_rows(retimed(samples, each(faster)), "prefixes", each(counted))


FAULT = Fault(
    name="prompts_from_the_prefix_cache",
    title="The second arm finds its prompts in the prefix cache and looks twice as fast.",
    report="vllm-project/vllm#52884",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
