"""All layers of a pass read one set of weights, which the cache holds from the first of them on."""

from harness.faults.fault import Fault
from tests.faults.played_timing import PlayedScene

FAULT = Fault(
    name="layers_share_one_set_of_weights",
    title="All layers of a pass read one set of weights, which the cache holds from the first of them on.",
    report="vllm-project/vllm#36592",
    target="timing",
    expected="sweep",
    scene=PlayedScene(is_warm=True),
)
