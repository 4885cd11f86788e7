"""The work goes to a stream of its own, where the caller's events and graphs do not see it."""

from collections.abc import Callable
from typing import Any

import torch

from harness.domain.machine import Tier
from tests.faults.planting import engine_fault

SIDE: list[torch.cuda.Stream] = []


def side() -> torch.cuda.Stream:
    if not SIDE:
        SIDE.append(torch.cuda.Stream())
    return SIDE[0]


def fault(sound: Callable[..., None], **args: Any) -> None:
    with torch.cuda.stream(side()):
        sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    side().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side()):
        sound(**args)
    torch.cuda.current_stream().wait_stream(side())


FAULT = engine_fault(
    "work_on_a_side_stream",
    title="The work goes to a stream of its own, where the caller's events and graphs do not see it.",
    report="gpu-mode/reference-kernels#162",
    at="k3_decode.cute.projection:projection",
    fault=fault,
    repaired=repaired,
    checks=("kernels/projection/k3/sm_90a.tp16.dcp1.b2.c1024.d0.",),
    expected="kernels",
    target="kernel",
    tier=Tier.RANK,
)
