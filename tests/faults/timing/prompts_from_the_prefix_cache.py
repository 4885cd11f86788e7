"""The second arm finds its prompts in the prefix cache and looks twice as fast."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def cached(row: Row) -> Row:
        return row | {"us": row["us"] * 0.54} if row["arm"] == "optimised" and not is_repaired else row

    return edit_rows(samples, "timings", each(cached))


FAULT = Fault(
    name="prompts_from_the_prefix_cache",
    title="The second arm finds its prompts in the prefix cache and looks twice as fast.",
    report="vllm-project/vllm#52884",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
    gap="the samples of a sweep hold no prefix-cache counters",
)
