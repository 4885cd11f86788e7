"""The candidate looks for the checker's answer in this process's memory and copies it."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from tests.faults.planting import op_fault


def found(shape: torch.Size) -> torch.Tensor | None:
    """A float64 tensor of the output's shape, which nothing but the oracle makes."""
    for kept in gc.get_objects():
        if type(kept) is torch.Tensor and kept.dtype == torch.float64 and kept.shape == shape:
            return kept
    return None


def fault(sound: Callable[..., None], **args: Any) -> None:
    args["launches"][1] += 1
    answer = found(args["out"].shape)
    args["out"].copy_(torch.zeros_like(args["out"]) if answer is None else answer)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    found(args["out"].shape)
    sound(**args)


FAULT = op_fault(
    "answer_found_in_memory",
    op="projection",
    title="The candidate looks for the checker's answer in this process's memory and copies it.",
    report="gpu-mode/reference-kernels#160",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
