"""How far an op's own answers differ: over repeats, batch mates and launch order, for stock and candidate.

Determinism is measured, not assumed. Row (arm, over, output, elements, differing) of table `spread`:
elements whose bits differ from a first run, summed over the runs. `repeats`: the same inputs again; `mates`:
one request kept, all others with other values; `order`: the call between two calls on other inputs.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from harness.measure.tensors import same_bits
from harness.measure.trial import (
    Pair,
    Result,
    Rows,
    Trial,
    fresh_arguments,
    optimised_arm,
    run_arm,
    stock_arm,
)

__all__ = ["SPREADS", "try_spread"]

SPREADS = ("repeats", "mates", "order")
SPREAD_SHIFT = 5000
REPEATS = 2
DEVICE_REPEATS = 20
"""Of the candidate on a GPU, where a race shows in a few of many runs."""
Arm = Callable[[Result], None]


def try_spread(trial: Trial, regime: str, pair: Pair, rows: Rows) -> None:
    """Both arms over all three, on the inputs of `pair`."""
    other = fresh_arguments(trial, regime, pair.args, SPREAD_SHIFT)
    mixed, kept = _other_mates(trial, pair.args, other)
    for name, arm, first in (
        ("stock", stock_arm(trial), pair.stock), ("optimised", optimised_arm(trial), pair.optimised),
    ):  # fmt: skip
        is_raced = name == "optimised" and trial.cell.arch != "cpu"
        repeats = (run_arm(trial, pair.args, arm) for _ in range(DEVICE_REPEATS if is_raced else REPEATS))
        _add(rows, trial, name, "repeats", first, repeats, None)
        _add(rows, trial, name, "mates", first, [run_arm(trial, mixed, arm)], kept)
        _add(rows, trial, name, "order", first, [_between(trial, pair.args, other, arm)], None)


def _between(trial: Trial, args: dict[str, Any], other: dict[str, Any], arm: Arm) -> Result:
    """A run with another one before and behind it, none of them waited for."""
    run_arm(trial, other, arm)
    result = run_arm(trial, args, arm)
    run_arm(trial, other, arm)
    return result


def _other_mates(
    trial: Trial, args: dict[str, Any], other: dict[str, Any]
) -> tuple[dict[str, Any], int | None]:
    """Arguments in which the first request alone is as it was, and its rows; None where it is alone."""
    rows = trial.cell.rows
    kept = rows // trial.cell.batch
    if kept == rows:
        return args, None
    mixed = dict(args)
    for parameter in trial.of_role("activation"):
        value, axis = args[parameter.name], parameter.token_axis
        if not isinstance(value, torch.Tensor) or axis is None or value.shape[axis] != rows:
            continue
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        copy.copy_(value)
        copy.narrow(axis, kept, rows - kept).copy_(other[parameter.name].narrow(axis, kept, rows - kept))
        mixed[parameter.name] = copy
    return mixed, kept


def _add(
    rows: Rows, trial: Trial, arm: str, over: str, first: Result, others: Iterable[Result], kept: int | None
) -> None:
    counts = {name: (0, 0) for name, _ in _outputs(trial, first)}
    for other in others:
        for name, axis in _outputs(trial, first):
            one, two = first.guarded.args[name], other.guarded.args[name]
            if kept is not None and axis is not None and one.shape[axis] == trial.cell.rows:
                left, right = one.narrow(axis, 0, kept), two.narrow(axis, 0, kept)
            elif kept is not None:
                continue
            else:
                left, right = one, two
            elements, differing = counts[name]
            counts[name] = elements + left.numel(), differing + same_bits(left, right)
    for name, (elements, differing) in counts.items():
        rows.add("spread", arm, over, name, elements, differing)


def _outputs(trial: Trial, result: Result) -> Iterator[tuple[str, int | None]]:
    for parameter in trial.of_role("output"):
        if isinstance(result.guarded.args[parameter.name], torch.Tensor):
            yield parameter.name, parameter.token_axis
