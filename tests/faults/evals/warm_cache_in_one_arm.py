"""The second arm finds the first one's prompts in the prefix cache."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def warm(row: Row) -> Row:
        is_it = (row["arm"], row["name"]) == ("optimised", "prefix_hits") and not is_repaired
        return row | {"value": 7} if is_it else row

    return edit_rows(samples, "counters", each(warm))


FAULT = Fault(
    name="warm_cache_in_one_arm",
    title="The second arm finds the first one's prompts in the prefix cache.",
    report="vllm-project/vllm#52884",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", edit),
)
