"""Time configurations of one op against each other, and read the ceiling that bounds them.

Runs in a child of `harness.tuning`. As in `bench`: every arm has copies of the arguments until they exceed
the cache twice, a turn over all copies is one sample (one CUDA graph on a GPU), and arms alternate in ABBA
order. Here the arms are configurations of the same kernel, on the same weights and with outputs of their own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.pack import Pack
from harness.domain.tuning import Configuration, TunablePack, TuningSpace
from harness.measure.bench import CPU_CACHE_BYTES
from harness.measure.trial import LAUNCH_SLOTS

__all__ = ["read_ceiling_gb_per_s", "time_configurations"]

MAX_COPIES = 32
TURNS_US = 3_000.0
"""A sample is at least so long: turns are repeated until it is."""
CEILING_BYTES = {"cpu": 2 * 2**20, "cuda": 2 * 2**30}
"""On a CPU what one core's caches hold, as nothing is faster; on a GPU far more than the cache."""
CEILING_MARGIN = 1.15
"""A plain read is not the fastest there can be."""
ORDERS = (("incumbent", "other", "null"), ("null", "other", "incumbent"))


def time_configurations(
    pack: Pack, tunable: TunablePack, space: TuningSpace, cell: Cell, model: str, other: Configuration, *,
    seed: int, blocks: int, has_null: bool,
) -> dict[str, list[float]]:  # fmt: skip
    """Microseconds a call by arm, block by block: `incumbent`, `other` and, if asked for, the incumbent again
    as `null`.
    """
    device = "cpu" if cell.arch == "cpu" else "cuda"
    arms = {"incumbent": space.incumbent, "other": other} | ({"null": space.incumbent} if has_null else {})
    make = partial(pack.make_args, space.op, cell, "gaussian", device=device, model=model)
    first = make(seed=seed)
    copies = _copies(first, device)
    sets = [first, *(make(seed=seed + place) for place in range(1, copies))]
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device)
    calls = [pack.bind_optimised(space.op, space.implementation, args, launches) for args in sets]
    with torch.no_grad():
        units = {
            arm: _unit(calls, partial(tunable.configured, space, configuration), device)
            for arm, configuration in arms.items()
        }
        repeats = max(1, round(TURNS_US / max(units["incumbent"](1), 1e-3)))
        for unit in units.values():
            unit(repeats)
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for block in range(blocks):
            for arm in ORDERS[block % 2]:
                if arm in units:
                    found[arm].append(units[arm](repeats) / repeats / copies)
    return found


def read_ceiling_gb_per_s(arch: str) -> float:
    """What this machine reads at most: a plain read's best rate, and a margin."""
    device = "cpu" if arch == "cpu" else "cuda"
    values = torch.ones(CEILING_BYTES[device] // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(20):
        begun = time.perf_counter_ns()
        values.sum()
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, CEILING_BYTES[device] / (time.perf_counter_ns() - begun))
    return best * CEILING_MARGIN


def _copies(args: Mapping[str, Any], device: str) -> int:
    held = sum(a.numel() * a.element_size() for a in args.values() if isinstance(a, torch.Tensor))
    cache = CPU_CACHE_BYTES if device == "cpu" else int(torch.cuda.get_device_properties(0).L2_cache_size)
    return max(1, min(MAX_COPIES, -(-2 * cache // max(held, 1))))


def _unit(
    calls: Sequence[Callable[[], object]], configured: Callable[[], AbstractContextManager[None]], device: str
) -> Callable[[int], float]:
    """Microseconds of so many turns over all calls under a configuration; on a GPU captured first."""

    def turn() -> None:
        for call in calls:
            call()

    if device == "cpu":

        def timed(turns: int) -> float:
            with configured():
                begun = time.perf_counter_ns()
                for _ in range(turns):
                    turn()
                return (time.perf_counter_ns() - begun) / 1e3

        return timed
    from harness.measure.replays import captured

    with configured():
        replay = captured(turn)
    replay()

    def replayed(turns: int) -> float:
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        begun.record()
        for _ in range(turns):
            replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) * 1e3

    return replayed
