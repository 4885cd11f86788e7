"""The output is a tensor that computes when somebody looks at it, so a timer sees nothing."""

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.planting import op_fault


class Lazy(torch.Tensor):
    """Gives its values on first use, through `__torch_function__`."""


def fault(sound: Callable[..., None], **args: Any) -> None:
    args["launches"][1] += 1
    lazy = torch.empty_like(args["out"]).as_subclass(Lazy)
    args["out"] = lazy  # a caller that kept its own buffer never sees this


def repaired(sound: Callable[..., None], **args: Any) -> None:
    wide = torch.empty_like(args["out"]).as_subclass(Lazy)
    sound(**(args | {"out": wide}))
    args["out"].copy_(wide.as_subclass(torch.Tensor))


FAULT = op_fault(
    "lazy_output",
    op="projection",
    title="The output is a tensor that computes when somebody looks at it, so a timer sees nothing.",
    report="gpu-mode/reference-kernels#161",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
