"""Time two arms so that drift hits both alike: blocks in ABBA order, with a second copy of A for the noise
floor.

`time_arms` runs the blocks; `compare` is pure and gives ratio, interval and noise floor from the raw times.
Times are in microseconds of one unit of work. A CPU unit is timed with `perf_counter_ns`; a GPU unit by
whatever the caller's unit returns (events around a graph replay), as this module only orders the calls.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["ABBA", "Comparison", "TimedUnit", "compare", "cpu_unit", "time_arms"]

TimedUnit = Callable[[], float]
"""Runs one unit of work and gives its microseconds."""
ABBA = (("stock", "optimised", "null", "slow"), ("slow", "null", "optimised", "stock"))
"""Order of arms in even and odd blocks: each arm's mean position is the same, so linear drift cancels."""
RESAMPLES = 2000


class Comparison(NamedTuple):
    """Stock time over the other arm's time, above 1 where the other is faster."""

    ratio: float
    low: float
    high: float
    stock_us: float
    other_us: float


def cpu_unit(work: Callable[[], object]) -> TimedUnit:
    """A unit timed with the monotonic nanosecond clock around `work`."""

    def unit() -> float:
        begun = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - begun) / 1e3

    return unit


def time_arms(
    arms: Mapping[str, TimedUnit], blocks: int, enough: Callable[[Sequence[tuple[str, int, float]]], bool]
) -> tuple[tuple[str, int, float], ...]:
    """(arm, block, us) for up to `blocks` blocks of all arms, at least four; stops early when `enough` says
    so.

    Every arm does one unit before the first block, outside the samples: the first call of anything is slow.
    """
    for unit in arms.values():
        unit()
    rows: list[tuple[str, int, float]] = []
    for block in range(blocks):
        rows += [(arm, block, arms[arm]()) for arm in ABBA[block % 2] if arm in arms]
        if block >= 3 and block % 2 and enough(rows):
            break
    return tuple(rows)


def compare(stock_us: Sequence[float], other_us: Sequence[float], alpha: float, seed: int) -> Comparison:
    """Ratio of medians with a bootstrap interval, paired by block; each end one-sided at `alpha`.

    Raises `ValueError` when the arms have different or fewer than four blocks.
    """
    if len(stock_us) != len(other_us) or len(stock_us) < 4:
        raise ValueError(
            f"{len(stock_us)} and {len(other_us)} blocks cannot be compared: four pairs at least"
        )
    ratios = _resampled_ratios(stock_us, other_us, seed)
    cut = int(alpha * RESAMPLES)
    return Comparison(
        median(stock_us) / median(other_us),
        ratios[cut],
        ratios[RESAMPLES - 1 - cut],
        median(stock_us),
        median(other_us),
    )


def _resampled_ratios(stock_us: Sequence[float], other_us: Sequence[float], seed: int) -> list[float]:
    """Ratios of medians of pairs drawn with replacement, sorted. Drawn as `random.choices` draws."""
    import numpy

    source, count = random.Random(seed), len(stock_us)
    drawn = numpy.array([source.random() for _ in range(RESAMPLES * count)]) * float(count)
    places = numpy.floor(drawn).astype(int).reshape(RESAMPLES, count)
    stock, other = (numpy.median(numpy.array(us)[places], axis=1) for us in (stock_us, other_us))
    return sorted(float(ratio) for ratio in stock / other)
