"""Paired binary comparison: the same items answered by both arms, right or wrong.

Intervals are Tango's score intervals for the difference of paired proportions (Tango 1998, Statistics in
Medicine 17:891), which keep their coverage when few or no pairs disagree, where Wald's collapse to a point.
Everything is one-sided at `alpha` on each end, as non-inferiority asks one question at one end.
"""

from collections.abc import Callable
from enum import StrEnum
from math import ceil, sqrt
from typing import NamedTuple

__all__ = [
    "Pairs",
    "PairedVerdict",
    "Verdict",
    "compare_pairs",
    "items_needed",
    "power_at_margin",
    "tango_interval",
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
    """Items at which that chance reaches the policy's power."""


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
    from scipy import special  # as in `_upper`

    share = max(discordance, 1.0 / (2 * n))
    spread = sqrt(share / n)
    return float(special.ndtr(margin / spread - _upper(alpha)))


def items_needed(discordance: float, margin: float, alpha: float, power: float) -> int:
    """Items at which `power_at_margin` reaches `power` and the interval can be narrow enough at all."""
    z_alpha, z_power = _upper(alpha), -_upper(power)
    by_spread = discordance * ((z_alpha + z_power) / margin) ** 2
    by_score = z_alpha**2 * (1 - margin) / margin
    return ceil(max(by_spread, by_score, 1.0))


def compare_pairs(pairs: Pairs, margin: float, alpha: float, power: float) -> PairedVerdict:
    """Non-inferiority of the optimised arm by `margin` (a share, such as 0.03)."""
    low, high = tango_interval(pairs, alpha)
    discordant = pairs.only_stock + pairs.only_optimised
    p = _mcnemar_p(pairs.only_stock, discordant) if discordant else 1.0
    chance = power_at_margin(pairs.n, discordant / pairs.n, margin, alpha)
    if low > -margin:
        verdict = Verdict.NOT_WORSE
    elif high < 0 or chance >= power:
        verdict = Verdict.WORSE
    else:
        verdict = Verdict.OPEN
    needed = items_needed(discordant / pairs.n, margin, alpha, power)
    return PairedVerdict(verdict, pairs.difference, low, high, p, chance, needed)


def _upper(alpha: float) -> float:
    """Standard normal value with `alpha` above it."""
    # Judging needs scipy; a bare machine that only samples does not. `scipy.stats` takes 2 s to load.
    from scipy import special

    return -float(special.ndtri(alpha))


def _mcnemar_p(only_stock: int, discordant: int) -> float:
    """Exact two-sided p-value that either arm wins a discordant pair equally often."""
    from scipy import stats

    return float(stats.binomtest(only_stock, discordant).pvalue)


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
    from scipy import optimize  # as in `_upper`

    return float(optimize.brentq(score, left, right, args=(sign,), xtol=1e-10))
