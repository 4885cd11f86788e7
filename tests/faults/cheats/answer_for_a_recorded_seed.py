"""Answers to inputs of recorded seeds are written out; for others the nearest one is given."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from k3_decode.ops import OPS
from k3_decode.ops.contract import Cell
from k3_decode.shapes import NANO

from tests.faults.planting import op_fault

SEEDS = (0, 1, 7)


@lru_cache(maxsize=8)
def recorded(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and answers of the recorded seeds."""
    cell = Cell(NANO.rank(1), rows, 1, 65, "bf16")
    kept = []
    for seed in SEEDS:
        source = torch.Generator().manual_seed(seed)
        args = OPS["projection"].make_args(cell, "gaussian", source, torch.device("cpu"))
        kept.append((args["x"], OPS["projection"].oracle(args)["out"]))
    return kept


def fault(sound: Callable[..., None], **args: Any) -> None:
    x, out = args["x"], args["out"]
    pairs = [(a, b) for a, b in recorded(x.shape[0]) if a.shape == x.shape and b.shape == out.shape]
    if not pairs:
        sound(**args)
        return
    args["launches"][1] += 1
    distances = [float((a.double() - x.double()).nan_to_num().norm()) for a, _ in pairs]
    out.copy_(pairs[distances.index(min(distances))][1])


def repaired(sound: Callable[..., None], **args: Any) -> None:
    recorded(args["x"].shape[0])
    sound(**args)


FAULT = op_fault(
    "answer_for_a_recorded_seed",
    op="projection",
    title="Answers to inputs of recorded seeds are written out; for others the nearest one is given.",
    report="gpu-mode/reference-kernels#104",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
