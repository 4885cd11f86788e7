"""NaN, which a comparison written as `not greater than` lets pass."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    args["out"][-1] = float("nan")


def repaired(sound: Callable[..., None], **args: Any) -> None:
    args["out"].fill_(float("nan"))
    sound(**args)


FAULT = op_fault(
    "nan_returned",
    op="latent_tail",
    title="NaN, which a comparison written as `not greater than` lets pass.",
    report="pytorch/pytorch#72194",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
