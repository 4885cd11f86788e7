"""Time one op: stock and candidate interleaved, cold data, and stock against itself for the noise floor.

Every arm works on copies of the arguments of its own, in turn, until they exceed the cache twice, so that no
call finds its weights where the last one left them. On a GPU the calls of one turn are one CUDA graph, timed
with events; on a CPU they are timed with the monotonic clock. What comes out is per call. Outputs are not
judged here: `kernels test` does that.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.errors import DeviceMissing
from harness.domain.pack import Pack
from harness.domain.record import Record
from harness.measure.interleaved import Comparison, TimedUnit, compare, cpu_unit, time_arms
from harness.measure.trial import LAUNCH_SLOTS

__all__ = ["OpTiming", "time_op"]

CPU_CACHE_BYTES = 32 * 2**20
"""Taken for the last-level cache of a CPU where nothing better is known."""
MAX_COPIES = 64
NARROW = 0.02
"""Sampling stops early when the ratio's interval is narrower than this share of it."""


class OpTiming(Record):
    """One op in one cell: microseconds a call, and what they rest on."""

    op: str
    model: str
    cell: Cell
    implementation: str
    method: str
    stock_us: float
    optimised_us: float
    ratio: float
    """Stock time over optimised time."""
    ratio_low: float
    ratio_high: float
    null_ratio: float
    """Stock over stock: how far from 1 a ratio may be by noise alone."""
    null_low: float
    null_high: float
    moved_bytes: int | None
    """What one call must move, by formula; None at shapes other than the claimed model's."""
    optimised_gb_per_s: float | None
    blocks: int
    copies: int


def time_op(
    pack: Pack,
    op: str,
    implementation: str,
    cell: Cell,
    model: str,
    *,
    seed: int,
    blocks: int,
    alpha: float = 0.05,
) -> OpTiming:
    """Times of one op in one cell; raises `DeviceMissing` where the cell needs a GPU that is not here."""
    device = "cpu" if cell.arch == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceMissing(f"{op} in {cell.label()} needs a GPU with {cell.arch}, and torch sees none here")
    make = partial(pack.make_args, op, cell, "gaussian", device=device, model=model)
    copies = _copies(make(seed=seed), device)
    regime_args = {
        arm: [make(seed=seed + 1 + place) for place in range(copies)]
        for arm in ("stock", "optimised", "null")
    }
    calls: dict[str, list[Callable[[], object]]] = {
        arm: [partial(pack.run_stock, op, args) for args in regime_args[arm]] for arm in ("stock", "null")
    }
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device)
    calls["optimised"] = [
        pack.bind_optimised(op, implementation, args, launches) for args in regime_args["optimised"]
    ]
    with torch.no_grad():
        units = {arm: _unit(calls[arm], device) for arm in calls}
        rows = time_arms(units, blocks, partial(_is_narrow, alpha=alpha))
    times = {arm: [us / copies for a, _, us in rows if a == arm] for arm in units}
    found = compare(times["stock"], times["optimised"], alpha, seed)
    null = compare(times["stock"], times["null"], alpha, seed)
    return _timing(pack, op, implementation, cell, model, found, null, len(times["stock"]), copies, device)


def _timing(
    pack: Pack,
    op: str,
    implementation: str,
    cell: Cell,
    model: str,
    found: Comparison,
    null: Comparison,
    blocks: int,
    copies: int,
    device: str,
) -> OpTiming:
    moved = pack.traffic(op, cell, None)[0] if model == pack.claimed_model else None
    return OpTiming(
        op=op,
        model=model,
        cell=cell,
        implementation=implementation,
        method="CUDA graph of one call a copy, events"
        if device == "cuda"
        else "one call a copy, monotonic clock",
        stock_us=found.stock_us,
        optimised_us=found.other_us,
        ratio=found.ratio,
        ratio_low=found.low,
        ratio_high=found.high,
        null_ratio=null.ratio,
        null_low=null.low,
        null_high=null.high,
        moved_bytes=moved,
        optimised_gb_per_s=None if moved is None else moved / found.other_us / 1e3,
        blocks=blocks,
        copies=copies,
    )


def _copies(args: Mapping[str, Any], device: str) -> int:
    """How many argument sets exceed the cache twice."""
    held = sum(a.numel() * a.element_size() for a in args.values() if isinstance(a, torch.Tensor))
    cache = CPU_CACHE_BYTES if device == "cpu" else int(torch.cuda.get_device_properties(0).L2_cache_size)
    return max(1, min(MAX_COPIES, -(-2 * cache // max(held, 1))))


def _unit(calls: list[Callable[[], object]], device: str) -> TimedUnit:
    """One turn over all copies, timed; on a GPU captured first."""

    def turn() -> None:
        for call in calls:
            call()

    if device == "cpu":
        return cpu_unit(turn)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.stream(side):
        turn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()

    def replay() -> float:
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) * 1e3

    return replay


def _is_narrow(rows: Any, alpha: float) -> bool:
    by_arm = {arm: [us for a, _, us in rows if a == arm] for arm in ("stock", "optimised")}
    found = compare(by_arm["stock"], by_arm["optimised"], alpha, seed=len(rows))
    return found.high - found.low < NARROW * found.ratio
