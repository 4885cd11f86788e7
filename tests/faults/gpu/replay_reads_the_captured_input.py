"""A replay reads a copy of the input that was made at capture."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.domain.machine import Tier
from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import wrapped

COPIES: list[torch.Tensor] = []


def plant(is_repaired: bool) -> AbstractContextManager[None]:
    def run(sound: Callable[..., None], **args: Any) -> None:
        if torch.cuda.is_current_stream_capturing() and not is_repaired:
            COPIES.append(torch.zeros_like(args["x"]))
            args["x"] = COPIES[-1]
        sound(**args)

    return wrapped("k3_decode.cute.projection:projection", run)


FAULT = Fault(
    name="replay_reads_the_captured_input",
    title="A replay reads a copy of the input that was made at capture.",
    report="vllm-project/vllm#52308",
    target="kernel",
    expected="kernels",
    scene=PatchScene(plant, ("kernels/projection/k3/sm_90a.tp16.dcp1.b2.c1024.d0.",)),
    tier=Tier.RANK,
)
