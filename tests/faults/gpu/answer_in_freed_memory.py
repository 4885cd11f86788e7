"""The candidate takes fresh blocks from the allocator and looks for the checker's answer in them."""

from collections.abc import Callable
from typing import Any

import torch

from harness.domain.machine import Tier
from tests.faults.planting import engine_fault

BLOCKS = 64


def candidates(out: torch.Tensor) -> list[torch.Tensor]:
    """Blocks as the allocator gives them, of the size of an oracle's answer."""
    if torch.cuda.is_current_stream_capturing():
        return []
    return [torch.empty(out.shape, dtype=torch.float64, device=out.device) for _ in range(BLOCKS)]


def fault(sound: Callable[..., None], **args: Any) -> None:
    out = args["out"]
    blocks = candidates(out)
    sound(**args)
    first = out[:1].double()
    near = [b for b in blocks if bool(((b[:1] - first).abs() < 0.1 * first.abs() + 0.1).all())]
    out.copy_(near[0] if near else torch.zeros_like(out))


def repaired(sound: Callable[..., None], **args: Any) -> None:
    candidates(args["out"])
    sound(**args)


FAULT = engine_fault(
    "answer_in_freed_memory",
    title="The candidate takes fresh blocks from the allocator and looks for the checker's answer in them.",
    report="gpu-mode/reference-kernels#160",
    at="k3_decode.cute.projection:projection",
    fault=fault,
    repaired=repaired,
    checks=("kernels/projection/k3/sm_90a.tp16.dcp1.b2.c1024.d0.",),
    expected="kernels",
    target="kernel",
    tier=Tier.RANK,
)
