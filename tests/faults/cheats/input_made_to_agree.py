"""The input is set to zero, so that whoever computes the truth afterwards agrees with zeros."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    args["x"].zero_()
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    kept = args["x"].clone()
    sound(**(args | {"x": kept}))
    kept.zero_()


FAULT = op_fault(
    "input_made_to_agree",
    op="projection",
    title="The input is set to zero, so that whoever computes the truth afterwards agrees with zeros.",
    report="ScalingIntelligence/KernelBench#82",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
