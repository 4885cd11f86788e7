"""An op that waits for the device is put into a captured graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness.domain.machine import Tier
from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import wrapped


def plant(is_repaired: bool) -> AbstractContextManager[None]:
    def run(sound: Callable[..., None], **args: Any) -> None:
        if not is_repaired:
            args["x"][0, 0].item()
        sound(**args)

    return wrapped("k3_decode.cute.projection:projection", run)


FAULT = Fault(
    name="op_not_safe_to_capture",
    title="An op that waits for the device is put into a captured graph.",
    report="vllm-project/vllm#52205",
    target="kernel",
    expected="kernels",
    scene=PatchScene(plant, ("kernels/projection/k3/",)),
    tier=Tier.RANK,
)
