"""A padded copy of the input is made once and read ever after, as a captured graph would."""

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.planting import op_fault

PADDED: dict[tuple[int, ...], torch.Tensor] = {}


def pad(args: dict[str, Any], is_frozen: bool) -> torch.Tensor:
    shape = tuple(args["latent"].shape)
    if not is_frozen or shape not in PADDED:
        PADDED[shape] = args["latent"].clone()
    return PADDED[shape]


def fault(sound: Callable[..., None], **args: Any) -> None:
    sound(**(args | {"latent": pad(args, is_frozen=True)}))


def repaired(sound: Callable[..., None], **args: Any) -> None:
    sound(**(args | {"latent": pad(args, is_frozen=False)}))


FAULT = op_fault(
    "padded_input_frozen",
    op="latent_tail",
    title="A padded copy of the input is made once and read ever after, as a captured graph would.",
    report="vllm-project/vllm#52383",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
