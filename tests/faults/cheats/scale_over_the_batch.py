"""A scale is taken over all rows of the step, so an answer depends on who shares it."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    largest = args["x"].float().abs().amax()
    args["latent"].copy_(args["latent"].float() / largest * largest)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    largest = args["x"].float().abs().amax(-1, keepdim=True).nan_to_num(nan=1.0, posinf=1.0).clamp(1e-3)
    args["latent"].copy_(args["latent"].float() / largest * largest)


FAULT = op_fault(
    "scale_over_the_batch",
    op="moe_front",
    title="A scale is taken over all rows of the step, so an answer depends on who shares it.",
    report="vllm-project/vllm#51187",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
