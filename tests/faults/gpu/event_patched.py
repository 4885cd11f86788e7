"""The candidate replaces the device's timer with one that runs a hundred times too slow."""

from collections.abc import Callable
from typing import Any

import torch

from harness.domain.machine import Tier
from tests.faults.planting import engine_fault

SOUND = torch.cuda.Event.elapsed_time


def slowed(self: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return SOUND(self, end) / 100


def fault(sound: Callable[..., None], **args: Any) -> None:
    torch.cuda.Event.elapsed_time = slowed  # type: ignore[method-assign]  # the fault
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    torch.cuda.Event.elapsed_time = SOUND  # type: ignore[method-assign]  # what it was
    sound(**args)


def undo() -> None:
    torch.cuda.Event.elapsed_time = SOUND  # type: ignore[method-assign]  # what it was


FAULT = engine_fault(
    "event_patched",
    title="The candidate replaces the device's timer with one that runs a hundred times too slow.",
    report="gpu-mode/reference-kernels#162",
    at="k3_decode.cute.projection:projection",
    fault=fault,
    repaired=repaired,
    undo=undo,
    checks=("kernels/projection/k3/sm_90a.tp16.dcp1.b2.c1024.d0.",),
    expected="kernels",
    target="kernel",
    tier=Tier.RANK,
)
