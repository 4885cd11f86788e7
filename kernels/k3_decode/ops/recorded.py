"""Activations as they were in a real step: rows recorded in the canary and in a slice of K3's own width.

`recorded.npz` beside this file is written by `python -m k3_decode.canary.record`: for each op's activation,
rows of a trained small model's decode steps (`canary/<op>.<parameter>`) and rows that went through one layer
of the claimed model's ops with drawn weights (`slice/...`). Wider shapes take several rows side by side;
which rows, the generator says.
"""

import math
from functools import cache
from pathlib import Path

import numpy
import torch

__all__ = ["FILE", "recorded_rows"]

FILE = Path(__file__).with_name("recorded.npz")
WIDE = 1000
"""Width from which a row is the claimed model's rather than the canary's."""


def recorded_rows(source: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """fp32 values of `shape` out of the rows kept for `source`, such as `projection.x`.

    Raises `KeyError` where none are kept.
    """
    kept = _kept()
    first, second = ("slice", "canary") if shape[-1] >= WIDE else ("canary", "slice")
    name = f"{first}/{source}" if f"{first}/{source}" in kept else f"{second}/{source}"
    rows = kept[name]
    times = math.prod(shape[:-1])
    beside = -(-shape[-1] // rows.shape[1])
    picked = torch.randint(0, len(rows), (times * beside,), generator=generator)
    return rows[picked].view(times, -1)[:, : shape[-1]].reshape(shape)


@cache
def _kept() -> dict[str, torch.Tensor]:
    """Every recorded array in fp32; 16-bit words in the file are bf16."""
    found = {}
    with numpy.load(FILE, allow_pickle=False) as arrays:
        for name in arrays.files:
            values = torch.from_numpy(arrays[name])
            is_half = values.dtype == torch.int16
            found[name] = values.view(torch.bfloat16).float() if is_half else values.float()
    return found
