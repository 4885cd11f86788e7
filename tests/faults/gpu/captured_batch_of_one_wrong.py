"""A captured graph of one request gives other values than the eager step."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.domain.machine import Tier
from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import wrapped


def plant(is_repaired: bool) -> AbstractContextManager[None]:
    def run(sound: Callable[..., None], **args: Any) -> None:
        sound(**args)
        is_hit = torch.cuda.is_current_stream_capturing() and args["x"].shape[0] == 1
        args["out"].mul_(1.0 if is_repaired or not is_hit else 1.05)

    return wrapped("k3_decode.cute.projection:projection", run)


FAULT = Fault(
    name="captured_batch_of_one_wrong",
    title="A captured graph of one request gives other values than the eager step.",
    report="vllm-project/vllm#52531",
    target="kernel",
    expected="kernels",
    scene=PatchScene(plant, ("kernels/projection/k3/sm_90a.tp1.dcp1.b1.",)),
    tier=Tier.RANK,
)
