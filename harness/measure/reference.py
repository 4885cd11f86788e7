"""Inputs, stock's answers and the truth, written by a process that no candidate's kernels ran in.

What a timed process left is compared with these files afterwards, so that no answer lies in its memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, Pack
from harness.measure.tensor_files import save_arguments
from harness.measure.tensors import guard

__all__ = ["WEIGHT_SEED", "laid_out_weights", "write_reference"]

WEIGHT_SEED = 1
"""Of the weights in every process: those that a candidate laid out are those that the truth is of."""


def write_reference(
    pack: Pack, contract: OpContract, cell: Cell, model: str, regime: str, seeds: Sequence[int], folder: Path
) -> tuple[Path, ...]:
    """A folder a seed with `arguments`, `truth` and `stock`; weights are in the first alone."""
    device = "cpu" if cell.arch == "cpu" else "cuda"
    kept = laid_out_weights(pack, contract, cell, model, regime)
    found = []
    for number, seed in enumerate(seeds):
        args = pack.make_args(contract.name, cell, regime, seed, device, model) | kept
        place = folder / f"inputs{number}"
        save_arguments({n: v for n, v in args.items() if number == 0 or n not in kept}, place / "arguments")
        with torch.no_grad():
            truth = pack.oracle(contract.name, args)
            stock = guard(args).args
            pack.run_stock(contract.name, stock)
        outputs = [p.name for p in contract.parameters if p.role == "output" and p.name in truth]
        save_arguments({name: truth[name] for name in outputs}, place / "truth")
        save_arguments({name: stock[name] for name in outputs}, place / "stock")
        found.append(place)
    return tuple(found)


def laid_out_weights(pack: Pack, contract: OpContract, cell: Cell, model: str, regime: str) -> dict[str, Any]:
    """The weights that every timed call has."""
    device = "cpu" if cell.arch == "cpu" else "cuda"
    args = pack.make_args(contract.name, cell, regime, WEIGHT_SEED, device, model)
    return {p.name: args[p.name] for p in contract.parameters if p.role == "weight"}
