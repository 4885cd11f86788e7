"""One op in one cell: stock and candidate on the same inputs, the oracle beside them.

Everything comes out as rows, unjudged; which rows there are is said where they are kept
(`stages/kernels/sampling.py`). Regime `reused` is the first regime's with other inputs in the same buffers,
so that results kept by address show; `mates` is healthy requests beside a poisoned one, on inputs of their
own. The candidate runs first: no answer that it could find in memory exists before (`run_pair`). What only a
GPU has, graphs and late predecessors, is in `replays`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, OpParameter, Pack
from harness.domain.record import Scalar
from harness.measure.tensors import (
    Guarded,
    TokenError,
    exact_mismatches,
    guard,
    operations_of,
    poison,
    same_bits,
    shared_operations,
    token_errors,
    unwritten,
)

__all__ = [
    "LAUNCH_SLOTS",
    "Pair",
    "Result",
    "Row",
    "Rows",
    "Trial",
    "error_rows",
    "exact_rows",
    "fresh_arguments",
    "has_error",
    "optimised_arm",
    "poison_outputs",
    "record",
    "release_memory",
    "run_arm",
    "run_pair",
    "stock_arm",
    "stock_errors",
    "token_rows",
    "touch_rows",
    "try_regime",
    "without_gradients",
]

LAUNCH_SLOTS = 16
"""Length of the counters that optimised ops add to."""
REUSE_SHIFT, MATES_SHIFT, SEEN_SHIFT = 1000, 3000, 6000
"""Offsets of seeds, so that inputs differ from every regime's."""
Row = tuple[Scalar, ...]


@dataclass(slots=True)
class Rows:
    """Rows by table, in the order in which they were seen."""

    tables: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, table: str, *row: Scalar) -> None:
        """One row more."""
        self.tables.setdefault(table, []).append(row)


@dataclass(frozen=True, slots=True)
class Trial:
    """One op in one cell on one device."""

    pack: Pack
    contract: OpContract
    cell: Cell
    model: str
    implementation: str
    seed: int
    device: str

    @property
    def op(self) -> str:
        """The op's name."""
        return self.contract.name

    def of_role(self, *roles: str) -> tuple[OpParameter, ...]:
        """Parameters of these roles, in order."""
        return tuple(p for p in self.contract.parameters if p.role in roles)

    @property
    def weights(self) -> frozenset[str]:
        """Names of what is laid out once, as at load time."""
        return frozenset(p.name for p in self.of_role("weight"))

    def arguments(self, regime: str, shift: int) -> dict[str, Any]:
        """Fresh arguments; equal shifts give equal values."""
        return self.pack.make_args(self.op, self.cell, regime, self.seed + shift, self.device, self.model)

    def settle(self) -> None:
        """Wait for the device, so that a fault shows where it was made."""
        if self.device != "cpu":
            torch.cuda.synchronize()


@dataclass(slots=True)
class Result:
    """One arm after its run."""

    guarded: Guarded
    launches: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pair:
    """Both arms on one set of inputs, and the truth."""

    args: dict[str, Any]
    truth: Mapping[str, Any]
    touched: Mapping[str, Any]
    """Masks of what a call may change, for state."""
    stock: Result
    optimised: Result


def try_regime(trial: Trial, regime: str, number: int, rows: Rows) -> Pair:
    """Both arms on one regime's inputs; in the first (number 0) also the repeats, replays and operations."""
    pair = run_pair(trial, trial.arguments(regime, number))
    record(trial, regime, pair, rows)
    if number == 0:
        _record_repeats(trial, pair, rows)
        _record_operations(trial, pair.args, rows)
        _record_seen_before(trial, regime, pair.args, rows)
        _record_reuse(trial, regime, pair, rows)
        _record_mates(trial, regime, pair.args, rows)
    return pair


def fresh_arguments(trial: Trial, regime: str, args: Mapping[str, Any], shift: int) -> dict[str, Any]:
    """Arguments of another seed over the weights of `args`."""
    return trial.arguments(regime, shift) | {name: args[name] for name in trial.weights}


def release_memory() -> None:
    """Give cached device memory back, so that others on the card find room."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_gradients() -> AbstractContextManager[object]:
    """No op under test needs a backward pass."""
    return torch.no_grad()


def error_rows(trial: Trial, regime: str, pair: Pair, optimised: dict[str, Any]) -> Iterator[Row]:
    """A row for each token of each inexact output, and for each touched row of inexact state."""
    for parameter in trial.of_role("output", "state"):
        if has_error(pair, parameter):
            by_stock = stock_errors(pair, parameter)
            yield from token_rows(regime, pair, parameter, by_stock, optimised[parameter.name])


def has_error(pair: Pair, parameter: OpParameter) -> bool:
    """Whether an output or state is compared by error, not bit for bit."""
    return not parameter.is_exact and isinstance(pair.truth.get(parameter.name), torch.Tensor)


def stock_errors(pair: Pair, parameter: OpParameter) -> tuple[TokenError, ...]:
    """Stock's own errors; the same whatever the other arm holds."""
    return _errors(pair, parameter, pair.stock.guarded.args[parameter.name])


def token_rows(
    regime: str, pair: Pair, parameter: OpParameter, by_stock: Sequence[TokenError], value: torch.Tensor
) -> Iterator[Row]:
    """A row for each token of an output or touched row of a state, where the optimised arm holds `value`."""
    kept = _touched_tokens(pair.touched.get(parameter.name), parameter.token_axis)
    errors = _errors(pair, parameter, value)
    for token, (a, b) in enumerate(zip(by_stock, errors, strict=True)):
        if kept is None or kept[token]:
            yield (
                regime, parameter.name, token, a.relative_l2, b.relative_l2, a.worst, b.worst, a.ulp,
                a.least,
            )  # fmt: skip


def _errors(pair: Pair, parameter: OpParameter, value: torch.Tensor) -> tuple[TokenError, ...]:
    dtype = pair.stock.guarded.args[parameter.name].dtype
    mask = pair.touched.get(parameter.name)
    return token_errors(value, pair.truth[parameter.name], dtype, parameter.token_axis, mask)


def exact_rows(
    trial: Trial, regime: str, truth: Mapping[str, Any], optimised: dict[str, Any]
) -> Iterator[Row]:
    """A row for each output or state that must equal the oracle bit for bit."""
    for parameter in trial.of_role("output", "state"):
        want = truth.get(parameter.name)
        if parameter.is_exact and isinstance(want, torch.Tensor):
            got = optimised[parameter.name]
            yield regime, parameter.name, got.numel(), exact_mismatches(got, want)


def touch_rows(
    trial: Trial, regime: str, arm: str, result: Result, touched: Mapping[str, Any]
) -> Iterator[Row]:
    """Changes outside of what the op may change, and output elements that no one wrote."""
    allowed: dict[str, torch.Tensor | None] = {p.name: None for p in trial.of_role("output", "workspace")}
    allowed |= {p.name: touched.get(p.name) for p in trial.of_role("state")}
    for touch in result.guarded.changed(allowed):
        yield regime, arm, touch.argument, touch.kind, touch.bytes_changed
    for parameter in trial.of_role("output"):
        value = result.guarded.args[parameter.name]
        left = unwritten(value) if isinstance(value, torch.Tensor) else 0
        if left:
            yield regime, arm, parameter.name, "unwritten", left * value.element_size()


def run_pair(trial: Trial, args: dict[str, Any], optimised: Result | None = None) -> Pair:
    """Oracle and both arms on the same inputs; a candidate that ran already is taken as it is.

    The candidate goes first, so that neither the oracle's nor stock's answer lies in memory that it can read.
    """
    optimised = optimised or run_arm(trial, args, optimised_arm(trial))
    truth = trial.pack.oracle(trial.op, args)
    stock = run_arm(trial, args, stock_arm(trial))
    return Pair(args, truth, trial.pack.touched(trial.op, args), stock, optimised)


def stock_arm(trial: Trial) -> Callable[[Result], None]:
    """What runs stock on a result's arguments."""
    return lambda result: trial.pack.run_stock(trial.op, result.guarded.args)


def optimised_arm(trial: Trial) -> Callable[[Result], None]:
    """What runs the candidate on a result's arguments."""
    pack, op, implementation = trial.pack, trial.op, trial.implementation
    return lambda result: pack.run_optimised(op, implementation, result.guarded.args, result.launches)


def run_arm(trial: Trial, args: dict[str, Any], arm: Callable[[Result], None]) -> Result:
    """One arm on guarded copies with poisoned outputs."""
    guarded = guard(args)
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=trial.device)
    poison_outputs(trial, guarded)
    result = Result(guarded, launches)
    arm(result)
    trial.settle()
    return result


def poison_outputs(trial: Trial, guarded: Guarded) -> None:
    """Bits in every output that no call gives; what the buffers hold then counts as what was there before."""
    for parameter in trial.of_role("output"):
        if isinstance(guarded.args[parameter.name], torch.Tensor):
            poison(guarded.args[parameter.name])
    guarded.remember()


def record(trial: Trial, regime: str, pair: Pair, rows: Rows) -> None:
    """Everything the judge needs of one pair of runs."""
    optimised = pair.optimised.guarded.args
    for row in error_rows(trial, regime, pair, optimised):
        rows.add("errors", *row)
    for row in exact_rows(trial, regime, pair.truth, optimised):
        rows.add("exact", *row)
    for arm, result in (("stock", pair.stock), ("optimised", pair.optimised)):
        for row in touch_rows(trial, regime, arm, result, pair.touched):
            rows.add("touches", *row)
    place = trial.pack.launch_index(trial.op)
    rows.add("launches", regime, int(pair.optimised.launches[place].item()))


def _touched_tokens(mask: torch.Tensor | None, axis: int | None) -> list[bool] | None:
    """Which tokens a mask touches at all; None where all count."""
    if mask is None or axis is None or mask.ndim == 0:
        return None
    return [bool(m) for m in mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(-1).tolist()]


def _record_repeats(trial: Trial, pair: Pair, rows: Rows) -> None:
    """The candidate again on fresh copies: how many elements come out differently."""
    second = run_arm(trial, pair.args, optimised_arm(trial))
    for parameter in trial.of_role("output", "state"):
        one, two = pair.optimised.guarded.args[parameter.name], second.guarded.args[parameter.name]
        if isinstance(one, torch.Tensor):
            rows.add("repeats", parameter.name, one.numel(), same_bits(one, two))


def _record_operations(trial: Trial, args: dict[str, Any], rows: Rows) -> None:
    """Torch operations of both arms, and of stock counting launches as the candidate would: the control."""
    recorded = {}
    for arm, work in (("stock", stock_arm(trial)), ("optimised", optimised_arm(trial))):
        result = Result(guard(args), torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=trial.device))
        recorded[arm] = operations_of(partial(work, result))
    disguised = Result(guard(args), torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=trial.device))

    def disguise() -> None:
        stock_arm(trial)(disguised)
        disguised.launches[trial.pack.launch_index(trial.op)] += 1

    recorded["disguised"] = operations_of(disguise)
    for arm, seen in recorded.items():
        rows.add("operations", arm, len(seen), shared_operations(recorded["stock"], seen))


def _record_seen_before(trial: Trial, regime: str, args: dict[str, Any], rows: Rows) -> None:
    """Torch operations on inputs that were never there before, and on the same again: an answer that is kept
    by content saves the second time. A call that copies a kept answer is the control.
    """
    fresh = fresh_arguments(trial, regime, args, SEEN_SHIFT)
    arm, recorded = optimised_arm(trial), dict[str, tuple[str, ...]]()
    for name in ("first", "second"):
        result = Result(guard(fresh), torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=trial.device))
        recorded[name] = operations_of(partial(arm, result))
    outputs = [result.guarded.args[p.name] for p in trial.of_role("output")]
    kept = [value.clone() for value in outputs if isinstance(value, torch.Tensor)]

    def remember() -> None:
        for value in kept:
            value.copy_(value)

    recorded["remembered"] = operations_of(remember)
    for name, seen in recorded.items():
        is_alike = not recorded["first"] and not seen
        share = 1.0 if is_alike else shared_operations(recorded["first"], seen)
        rows.add("operations", name, len(seen), share)


def _record_reuse(trial: Trial, regime: str, pair: Pair, rows: Rows) -> None:
    """Other inputs in the buffers of an earlier run: what was kept by address, or done once only, shows."""
    fresh = fresh_arguments(trial, regime, pair.args, REUSE_SHIFT)
    again = run_arm(trial, pair.args, optimised_arm(trial))
    again.guarded.refill(fresh, trial.weights)
    again.launches.zero_()
    poison_outputs(trial, again.guarded)
    optimised_arm(trial)(again)
    trial.settle()
    record(trial, "reused", run_pair(trial, fresh, again), rows)


def _record_mates(trial: Trial, regime: str, args: dict[str, Any], rows: Rows) -> None:
    """Healthy requests beside one whose activations are NaN, infinite and huge: they must not notice."""
    healthy = trial.cell.rows - trial.cell.rows // trial.cell.batch
    if not healthy:
        return
    shared = fresh_arguments(trial, regime, args, MATES_SHIFT)
    for parameter in trial.of_role("activation"):
        value, axis = shared[parameter.name], parameter.token_axis
        if _is_by_token(value, axis, trial.cell.rows) and value.dtype.is_floating_point:
            shared[parameter.name] = _with_poisoned_mate(value, axis, healthy)
    pair = run_pair(trial, shared)
    for parameter in trial.of_role("output"):
        want, axis = pair.truth.get(parameter.name), parameter.token_axis
        if not _is_by_token(want, axis, trial.cell.rows):
            continue
        arms = [r.guarded.args[parameter.name] for r in (pair.stock, pair.optimised)]
        want, stock, got = (value.narrow(axis, 0, healthy) for value in (want, *arms))
        if parameter.is_exact:
            rows.add("mates_exact", "mates", parameter.name, got.numel(), exact_mismatches(got, want))
            continue
        both = [token_errors(value, want, stock.dtype, axis) for value in (stock, got)]
        for token, (a, b) in enumerate(zip(*both, strict=True)):
            rows.add(
                "mates", "mates", parameter.name, token, a.relative_l2, b.relative_l2, a.worst, b.worst,
                a.ulp, a.least,
            )  # fmt: skip


def _is_by_token(value: object, axis: int | None, tokens: int) -> bool:
    """Whether a tensor has one entry a token along `axis`."""
    return isinstance(value, torch.Tensor) and axis is not None and value.shape[axis] == tokens


def _with_poisoned_mate(value: torch.Tensor, axis: int | None, healthy: int) -> torch.Tensor:
    """A copy at the same strides whose rows from `healthy` on hold 1e30, NaN and infinity by turns."""
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    copy.copy_(value)
    mate = copy.narrow(axis or 0, healthy, value.shape[axis or 0] - healthy)
    mate.fill_(1e30)
    mate[..., 1::3] = torch.nan
    mate[..., 2::3] = torch.inf
    return copy
