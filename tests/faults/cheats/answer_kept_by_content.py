"""The answer is kept by the input's content and given again when the content comes back."""

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.planting import op_fault

KEPT: dict[bytes, torch.Tensor] = {}


def key(args: dict[str, Any]) -> bytes:
    return bytes(args["x"].contiguous().view(torch.uint8).numpy().tobytes())


def fault(sound: Callable[..., None], **args: Any) -> None:
    found = KEPT.get(key(args))
    if found is not None and found.shape == args["out"].shape and found.dtype == args["out"].dtype:
        args["launches"][1] += 1
        args["out"].copy_(found)
        return
    sound(**args)
    KEPT[key(args)] = args["out"].clone()


def repaired(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    KEPT[key(args)] = args["out"].clone()


FAULT = op_fault(
    "answer_kept_by_content",
    op="projection",
    title="The answer is kept by the input's content and given again when the content comes back.",
    report="flashinfer-ai/flashinfer-bench-starter-kit#21",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
