"""The control of a kernel test: a good result made wrong in one way after another, each of which must be
noticed.

Inexact outputs are spoiled in float64, so that rounding to the output's dtype does not undo a small error.
The ladder of ever smaller errors tells how sharp the test is. After `spoil` the candidate's buffers are not
to be used any more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from harness.domain.pack import OpParameter
from harness.measure.tensors import poison, token_errors
from harness.measure.trial import (
    Pair,
    Rows,
    Trial,
    exact_rows,
    has_error,
    stock_errors,
    token_rows,
    touch_rows,
)

__all__ = ["Bounds", "spoil"]

LADDER = tuple(2.0**-k for k in range(12, 1, -1))
"""Relative errors planted in the output, smallest first, to find the smallest that is noticed."""
LADDER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """The acceptance rule, so that the control can go just beyond it."""

    factor: float
    floor_ulp: float
    step: float
    """The control's error as a multiple of the bound."""


def spoil(trial: Trial, regime: str, pair: Pair, bounds: Bounds, rows: Rows) -> None:
    """Rows of every control: `control_errors`, `control_exact`, `control_touches`."""
    good = pair.optimised.guarded.args
    for parameter in trial.of_role("output"):
        if not isinstance(good[parameter.name], torch.Tensor):
            continue
        by_stock = stock_errors(pair, parameter) if has_error(pair, parameter) else ()
        for control, spoiled in _spoiled(parameter, good[parameter.name], pair, bounds):
            if parameter.is_exact:
                values = {**good, parameter.name: spoiled}
                same = exact_rows(trial, regime, pair.truth, values)
                found, table = [row for row in same if row[1] == parameter.name], "control_exact"
            elif has_error(pair, parameter):
                found, table = list(token_rows(regime, pair, parameter, by_stock, spoiled)), "control_errors"
            else:
                found, table = [], "control_errors"
            for row in found[: LADDER_TOKENS if control.startswith("ladder") else None]:
                rows.add(table, control, *row)
    _spoil_memory(trial, regime, pair, rows)


def _spoiled(
    parameter: OpParameter, good: torch.Tensor, pair: Pair, bounds: Bounds
) -> Iterator[tuple[str, torch.Tensor]]:
    """(control, spoiled output)."""
    if parameter.is_exact:
        flipped = good.clone(memory_format=torch.contiguous_format)
        flipped.view(-1)[-1:] += 1
        yield "flipped", flipped
        return
    axis = parameter.token_axis
    wide = good.double().contiguous()
    margin = _margin(parameter, wide, pair, bounds)
    yield "scaled", wide * (1.0 + margin)
    one = wide.clone()
    one.view(-1)[-1] += margin * wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    yield "element", one
    has_rows = axis is not None and good.ndim > 0 and good.shape[axis] > 1
    yield "swapped", wide.roll(1, dims=axis if has_rows and axis is not None else -1)
    yield "zeroed", torch.zeros_like(wide)
    yield "not_a_number", torch.full_like(wide, torch.nan)
    for share in LADDER:
        yield f"ladder:{share:.3e}", wide * (1.0 + share)


def _margin(parameter: OpParameter, wide: torch.Tensor, pair: Pair, bounds: Bounds) -> float:
    """A relative error just above the bound of the worst token, the candidate's own error added."""
    want, kept = pair.truth[parameter.name], pair.stock.guarded.args[parameter.name]
    by_stock = token_errors(kept, want, kept.dtype, parameter.token_axis)
    own = token_errors(wide, want, kept.dtype, parameter.token_axis)
    worst = max(max(e.relative_l2, e.worst) for e in by_stock)
    floor, least = max(e.ulp for e in by_stock), max(e.least for e in by_stock)
    bound = max(bounds.factor * worst + bounds.floor_ulp * floor, bounds.floor_ulp * least)
    return bounds.step * bound + max(max(e.relative_l2, e.worst) for e in own)


def _spoil_memory(trial: Trial, regime: str, pair: Pair, rows: Rows) -> None:
    """A byte before an output, a byte of an input, an output element not written: each must be seen."""
    guarded = pair.optimised.guarded
    outputs = [p.name for p in trial.of_role("output") if isinstance(guarded.args[p.name], torch.Tensor)]
    inputs = [
        p.name
        for p in trial.of_role("activation", "weight", "index")
        if isinstance(guarded.args[p.name], torch.Tensor) and guarded.args[p.name].numel()
    ]
    spoilers: list[tuple[str, Callable[[], None]]] = []
    if outputs:
        spoilers.append(("guard", partial(guarded.spoil_guard, outputs[0])))
        spoilers.append(("unwritten", partial(_poison_last, guarded.args[outputs[0]])))
    if inputs:
        spoilers.append(("input", partial(guarded.spoil_first_byte, inputs[0])))
    for control, plant in spoilers:
        plant()
        for row in touch_rows(trial, regime, "optimised", pair.optimised, pair.touched):
            rows.add("control_touches", control, *row)


def _poison_last(tensor: torch.Tensor) -> None:
    poison(tensor[-1:])
