"""How much faster one arm is than another, from pairs of neighbours in time, without assuming a distribution.

The interval is that of the median of paired ratios by order statistics (Conover, Practical Nonparametric
Statistics, 1999, section 3.2): each end misses the true median with a chance of at most `alpha`, whatever the
times look like, so that an `alpha` that was divided among many attempts still has an exact end. Too few pairs
for an `alpha` give an interval that is open.
"""

from collections.abc import Sequence
from math import comb, inf
from statistics import median
from typing import NamedTuple

__all__ = ["MedianRatio", "ends_place", "least_pairs", "median_ratio"]


class MedianRatio(NamedTuple):
    """The median of paired ratios with its ends; infinite where so few pairs say nothing."""

    ratio: float
    low: float
    high: float


def median_ratio(first_us: Sequence[float], second_us: Sequence[float], alpha: float) -> MedianRatio:
    """First time over second time, above 1 where the second arm is faster.

    Raises `ValueError` for arms of different length, or none.
    """
    if len(first_us) != len(second_us) or not first_us:
        raise ValueError(f"{len(first_us)} and {len(second_us)} times make no pairs")
    ratios = sorted(a / b for a, b in zip(first_us, second_us, strict=True))
    place = ends_place(len(ratios), alpha)
    if place is None:
        return MedianRatio(median(ratios), 0.0, inf)
    return MedianRatio(median(ratios), ratios[place], ratios[len(ratios) - 1 - place])


def ends_place(pairs: int, alpha: float) -> int | None:
    """Place of the lower end among sorted ratios: the largest r such that fewer than r + 1 of so many fair
    coins show heads with a chance of at most `alpha`; None where even the smallest ratio is too likely.
    """
    total, found = 0, None
    for place in range(pairs):
        total += comb(pairs, place)
        if total / 2**pairs > alpha:
            break
        found = place
    return found


def least_pairs(alpha: float) -> int:
    """Pairs from which on both ends exist."""
    return next(n for n in range(1, 1000) if ends_place(n, alpha) is not None)
