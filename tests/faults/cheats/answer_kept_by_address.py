"""The answer is kept by the input's address and given again when the address comes back."""

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.planting import op_fault

KEPT: dict[int, torch.Tensor] = {}


def fault(sound: Callable[..., None], **args: Any) -> None:
    key = args["x"].data_ptr()
    if key in KEPT and KEPT[key].shape == args["out"].shape and KEPT[key].dtype == args["out"].dtype:
        args["launches"][1] += 1
        args["out"].copy_(KEPT[key])
        return
    sound(**args)
    KEPT[key] = args["out"].clone()


def repaired(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    KEPT[args["x"].data_ptr()] = args["out"].clone()


FAULT = op_fault(
    "answer_kept_by_address",
    op="projection",
    title="The answer is kept by the input's address and given again when the address comes back.",
    report="flashinfer-ai/flashinfer-bench-starter-kit#21",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
