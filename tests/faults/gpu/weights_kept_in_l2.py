"""The candidate sets part of L2 aside, so that its weights survive whatever flushes the cache."""

import ctypes
from collections.abc import Callable
from typing import Any

from harness.domain.machine import Tier
from tests.faults.planting import engine_fault

PERSISTING_L2 = 6


SET: list[int] = []


def limit(size: int) -> None:
    """Once, as the driver lets nobody do it while a graph is captured."""
    if [size] != SET:
        SET[:] = [size]
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(PERSISTING_L2, ctypes.c_size_t(size))


def fault(sound: Callable[..., None], **args: Any) -> None:
    limit(16 * 2**20)
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    limit(0)
    sound(**args)


FAULT = engine_fault(
    "weights_kept_in_l2",
    title="The candidate sets part of L2 aside, so that its weights survive whatever flushes the cache.",
    report="karpathy/llm.c#851",
    at="k3_decode.cute.projection:projection",
    fault=fault,
    repaired=repaired,
    undo=lambda: limit(0),
    checks=("kernels/projection/k3/sm_90a.tp16.dcp1.b2.c1024.d0.",),
    expected="kernels",
    target="kernel",
    tier=Tier.RANK,
)
