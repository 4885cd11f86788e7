"""The first two calls are right; afterwards half of the product is left out."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault

CALLS: list[int] = []


def fault(sound: Callable[..., None], **args: Any) -> None:
    CALLS.append(1)
    if len(CALLS) > 2:
        half = args["x"].clone()
        half[:, half.shape[1] // 2 :] = 0
        args["x"] = half
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    CALLS.append(1)
    sound(**args)


FAULT = op_fault(
    "warm_up_detected",
    op="projection",
    title="The first two calls are right; afterwards half of the product is left out.",
    report="gpu-mode/reference-kernels#162",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
