"""Paired comparison where answers are not independent, or their scores are no yes or no: a bootstrap over
problems.

Repeats of one problem share its difficulty, so problems are drawn again, each with all of its repeats. The
interval is the expanded percentile interval (Hesterberg 2015, The American Statistician 69:371): the plain
one is too short for few problems, by the factor of Student's t and of the sample variance. It is never
narrower than what as many answers without any difference would allow, as a difference not seen may still
exist; that floor is Tango's interval, which `paired` has. Seeded: the same differences give the same
interval.
"""

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import fmean, stdev, variance
from typing import NamedTuple

from harness.measure.paired import Verdict, verdict_of

__all__ = ["ClusteredVerdict", "compare_clusters"]

RESAMPLES = 2000
"""The ends' own error from resampling is then about 5 % of the spread at alpha 0.05."""


class ClusteredVerdict(NamedTuple):
    """The verdict with everything it rests on."""

    verdict: Verdict
    difference: float
    low: float
    high: float
    power: float
    """Chance of NOT_WORSE for two equal arms at this spread and number of problems."""
    clusters_needed: int
    """Problems, at these repeats, that would settle it."""
    repeats_needed: int | None
    """Repeats of these problems that would settle it; None where problems differ too much for any number."""


class _Limits(NamedTuple):
    margin: float
    alpha: float
    power: float
    false_alarm: float

    @property
    def settled_spread(self) -> float:
        """Standard error at which equal arms and a loss of the margin are told apart with the power."""
        return self.margin / (max(_upper(self.alpha), _upper(self.false_alarm)) - _upper(self.power))


def compare_clusters(
    clusters: Sequence[Sequence[float]],
    margin: float,
    alpha: float,
    power: float,
    false_alarm: float,
    seed: int,
) -> ClusteredVerdict:
    """Non-inferiority by `margin` from differences optimised minus stock, one sequence of repeats a problem.

    Every problem weighs the same. Rules as in `compare_pairs`. Raises `ValueError` for fewer than two
    problems or a problem without answers.
    """
    if len(clusters) < 2 or not all(clusters):
        raise ValueError("a bootstrap over problems needs two or more, each with an answer")
    limits = _Limits(margin, alpha, power, false_alarm)
    means = [fmean(differences) for differences in clusters]
    k, answers, estimate = len(means), sum(map(len, clusters)), fmean(means)
    below, above = _resampled_gaps(means, alpha, false_alarm, seed)
    low = estimate - max(below, _unseen(answers, alpha))
    high = estimate + max(above, _unseen(answers, false_alarm))
    spread = max(stdev(means) / sqrt(k), _unseen(answers, alpha) / _upper(alpha))
    chance = float(_normal(margin / spread - _upper(alpha)))
    verdict = verdict_of(low, high, margin, is_sure=chance >= max(power, 1.0 - false_alarm))
    needed = max(ceil(k * (spread / limits.settled_spread) ** 2), 2)
    return ClusteredVerdict(
        verdict, estimate, low, high, chance, needed, _repeats_needed(clusters, means, limits)
    )


def _resampled_gaps(
    means: Sequence[float], alpha: float, false_alarm: float, seed: int
) -> tuple[float, float]:
    """How far the expanded percentile interval reaches below and above the estimate."""
    import numpy as np

    values = np.asarray(means)
    k = len(values)
    picks = np.random.default_rng(seed).integers(0, k, (RESAMPLES, k))
    gaps = values[picks].mean(axis=1) - values.mean()
    below = -float(np.quantile(gaps, alpha)) * _stretch(k, alpha)
    above = float(np.quantile(gaps, 1.0 - false_alarm)) * _stretch(k, false_alarm)
    return below, above


def _repeats_needed(
    clusters: Sequence[Sequence[float]], means: Sequence[float], limits: _Limits
) -> int | None:
    """Repeats at which the spread between these problems' means is small enough; what the problems themselves
    differ by stays, however often they are repeated.
    """
    k, repeats = len(means), fmean(map(len, clusters))
    if repeats < 2:
        return None
    within = fmean(variance(c) for c in clusters if len(c) > 1)
    between = max(0.0, variance(means) - within / repeats)
    room = k * limits.settled_spread**2 - between
    if room <= 0:
        return None
    by_unseen = ceil(_upper(limits.alpha) ** 2 * (1 - limits.margin) / limits.margin / k)
    return max(ceil(within / room), by_unseen, 1)


def _stretch(k: int, alpha: float) -> float:
    """Student's t over normal, and sample over population standard deviation, for `k` problems."""
    from scipy import special  # `scipy.stats` takes 2 s to load

    return -float(special.stdtrit(k - 1, alpha)) / _upper(alpha) * sqrt(k / (k - 1))


def _unseen(answers: int, alpha: float) -> float:
    """Half the width of Tango's interval where `answers` pairs all agree."""
    squared = _upper(alpha) ** 2
    return squared / (answers + squared)


def _upper(alpha: float) -> float:
    """Standard normal value with `alpha` above it."""
    from scipy import special  # as in `_stretch`

    return -float(special.ndtri(alpha))


def _normal(value: float) -> float:
    from scipy import special  # as in `_stretch`

    return float(special.ndtr(value))
