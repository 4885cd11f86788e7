"""Paired binary comparison: the same items answered by both arms, right or wrong.

Intervals are Tango's score intervals for the difference of paired proportions (Tango 1998, Statistics in
Medicine 17:891), which keep their coverage when few or no pairs disagree, where Wald's collapse to a point.
Each end is one-sided: the lower one at `alpha`, as non-inferiority asks one question at one end; the upper
one at the false-alarm rate, so that two equal arms are called worse no more often than that.
"""

from collections.abc import Callable
from enum import StrEnum
from math import ceil, comb, erfc, sqrt
from statistics import NormalDist
from typing import NamedTuple

__all__ = [
    "Pairs",
    "PairedVerdict",
    "Verdict",
    "compare_pairs",
    "excess_p",
    "items_needed",
    "power_at_margin",
    "tango_interval",
    "verdict_of",
]


class Pairs(NamedTuple):
    """Counts of items by (stock right?, optimised right?)."""

    both: int
    only_stock: int
    only_optimised: int
    neither: int

    @property
    def n(self) -> int:
        """Items."""
        return self.both + self.only_stock + self.only_optimised + self.neither

    @property
    def difference(self) -> float:
        """Share right, optimised minus stock."""
        return (self.only_optimised - self.only_stock) / self.n


class Verdict(StrEnum):
    """What the interval says about a margin."""

    NOT_WORSE = "not_worse"
    WORSE = "worse"
    OPEN = "open"


class PairedVerdict(NamedTuple):
    """The verdict with everything it rests on."""

    verdict: Verdict
    difference: float
    low: float
    high: float
    mcnemar_p: float
    power: float
    """Chance of NOT_WORSE for two equal arms at this discordance and number of items."""
    items_needed: int
    """Items at which two equal arms are told from a loss of the margin with the policy's power, both ways."""


def tango_interval(pairs: Pairs, alpha: float) -> tuple[float, float]:
    """(low, high) of optimised minus stock, each end one-sided at `alpha`.

    Raises `ValueError` without items.
    """
    if pairs.n == 0:
        raise ValueError("a paired interval needs at least one item")
    z = _upper(alpha)
    estimate = pairs.difference

    def score(delta: float, sign: float) -> float:
        return _tango_score(pairs, delta) - sign * z

    low = -1.0 if score(-1.0 + 1e-9, 1.0) <= 0 else _root(score, 1.0, -1.0 + 1e-9, estimate)
    high = 1.0 if score(1.0 - 1e-9, -1.0) >= 0 else _root(score, -1.0, estimate, 1.0 - 1e-9)
    return low, high


def power_at_margin(n: int, discordance: float, margin: float, alpha: float) -> float:
    """Chance that two arms of equal accuracy are found not worse by `margin`, normal approximation.

    `discordance` is the share of items on which the arms differ; it is taken as at least one item in 2 n,
    because none seen among n does not mean that there is none.
    """
    share = max(discordance, 1.0 / (2 * n))
    spread = sqrt(share / n)
    return erfc((_upper(alpha) - margin / spread) / sqrt(2.0)) / 2.0


def items_needed(
    discordance: float, margin: float, alpha: float, power: float, false_alarm: float | None = None
) -> int:
    """Items at which `power_at_margin` reaches `power`, a loss of `margin` is called worse as surely, and the
    interval can be narrow enough at all.
    """
    z_alpha, z_power = _upper(alpha), -_upper(power)
    z_both = max(z_alpha, _upper(alpha if false_alarm is None else false_alarm))
    by_spread = discordance * ((z_both + z_power) / margin) ** 2
    by_score = z_alpha**2 * (1 - margin) / margin
    return ceil(max(by_spread, by_score, 1.0))


def compare_pairs(
    pairs: Pairs, margin: float, alpha: float, power: float, false_alarm: float | None = None
) -> PairedVerdict:
    """Non-inferiority of the optimised arm by `margin` (a share, such as 0.03).

    NOT_WORSE: the lower end is above -margin. WORSE: the upper end is below 0, or the lower end is at or
    below -margin although so many items would have excluded it: with `power`, and with all but `false_alarm`
    of the chance, as else equal arms would be called worse too often. OPEN: anything else. `false_alarm` is
    `alpha` where it is None.
    """
    alarm = alpha if false_alarm is None else false_alarm
    low, high = tango_interval(pairs, alpha)[0], tango_interval(pairs, alarm)[1]
    discordant = pairs.only_stock + pairs.only_optimised
    p = _mcnemar_p(pairs.only_stock, discordant) if discordant else 1.0
    chance = power_at_margin(pairs.n, discordant / pairs.n, margin, alpha)
    verdict = verdict_of(low, high, margin, is_sure=chance >= max(power, 1.0 - alarm))
    needed = items_needed(discordant / pairs.n, margin, alpha, power, alarm)
    return PairedVerdict(verdict, pairs.difference, low, high, p, chance, needed)


def verdict_of(low: float, high: float, margin: float, *, is_sure: bool) -> Verdict:
    """What an interval of optimised minus stock says; `is_sure`: equal arms would have excluded the
    margin.
    """
    if low > -margin:
        return Verdict.NOT_WORSE
    return Verdict.WORSE if high < 0 or is_sure else Verdict.OPEN


def excess_p(only_stock: int, only_optimised: int) -> float:
    """Exact one-sided p-value that the optimised arm shows something more often than stock only by chance."""
    return _chance_of_more(only_optimised, only_stock + only_optimised)


def _upper(alpha: float) -> float:
    """Standard normal value with `alpha` above it."""
    return -NormalDist().inv_cdf(alpha)


def _mcnemar_p(only_stock: int, discordant: int) -> float:
    """Exact two-sided p-value that either arm wins a discordant pair equally often."""
    rarer = max(only_stock, discordant - only_stock)
    return min(1.0, 2.0 * _chance_of_more(rarer, discordant))


def _chance_of_more(count: int, discordant: int) -> float:
    """Chance of `count` or more heads in as many throws of a fair coin as pairs disagree, exactly. Whole
    numbers do it; `scipy.stats` takes a second to load, which every verification would wait for.
    """
    ways = term = comb(discordant, count)
    for heads in range(count, discordant):
        term = term * (discordant - heads) // (heads + 1)
        ways += term
    return ways / (1 << discordant)


def _tango_score(pairs: Pairs, delta: float) -> float:
    """Score statistic of the hypothesis that the difference is `delta`."""
    n, gained, lost = pairs.n, pairs.only_optimised, pairs.only_stock
    a = 2.0 * n
    b = -gained - lost + (2.0 * n - gained + lost) * delta
    c = -lost * delta * (1.0 - delta)
    q_lost = (sqrt(max(0.0, b * b - 4.0 * a * c)) - b) / (2.0 * a)
    variance = n * (2.0 * q_lost + delta * (1.0 - delta))
    gap = gained - lost - n * delta
    if variance <= 0.0:
        return 0.0 if gap == 0 else float("inf") * gap
    return gap / sqrt(variance)


def _root(score: Callable[[float, float], float], sign: float, left: float, right: float) -> float:
    """Where a falling score crosses zero, to the last bit; raises `ValueError` where it does not."""
    if not score(left, sign) >= 0.0 >= score(right, sign):
        raise ValueError(f"the score does not cross zero between {left} and {right}")
    middle = (left + right) / 2.0
    while left < middle < right:
        left, right = (middle, right) if score(middle, sign) > 0.0 else (left, middle)
        middle = (left + right) / 2.0
    return middle
