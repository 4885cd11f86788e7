"""Zeros, which an absolute tolerance larger than the outputs lets pass."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    args["out"].zero_()


def repaired(sound: Callable[..., None], **args: Any) -> None:
    args["out"].zero_()
    sound(**args)


FAULT = op_fault(
    "zeros_returned",
    op="situ_mlp",
    title="Zeros, which an absolute tolerance larger than the outputs lets pass.",
    report="ScalingIntelligence/KernelBench#165",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
