"""The candidate calls stock and counts a launch."""

from collections.abc import Callable
from typing import Any

from k3_decode.ops.projection import stock

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], *, launches: Any, **args: Any) -> None:
    launches[1] += 1
    stock(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)


FAULT = op_fault(
    "stock_called_instead",
    op="projection",
    title="The candidate calls stock and counts a launch.",
    report="pytorch/pytorch#146554",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
