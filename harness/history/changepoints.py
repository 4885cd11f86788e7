"""Where a series of numbers moved, without assuming how they are distributed.

1. PELT (Killick et al. 2012, by ruptures) on ranks proposes places. Ranks, because single outliers, which a
   shared machine produces, then weigh no more than any other point.
2. A permutation test of the whole series asks whether any stretch of it lies apart from the rest more than
   the best stretch of shuffled points does (the statistic of circular binary segmentation, Olshen et al.
   2004). Comparing best with best allows for having searched. Otherwise nothing moved.
3. The same test, of single splits, keeps a place in the segments on both of its sides. The worst place goes
   first, and its neighbours are tested again without it.
4. Each kept place moves to where two medians fit the values best, as ranks tell a step from noise but not a
   large step from a small one.
5. Benjamini and Hochberg (1995) over all series hold the share of false places.

Under ten points nothing can be significant, and none is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import false_discovery_control, rankdata

from harness.domain.errors import DeviceMissing

__all__ = ["MIN_POINTS", "MIN_SEGMENT", "Place", "find_places", "significant"]

MIN_POINTS = 10
"""Below, no split of points in two can reach a p-value of 0.05 after the search."""
MIN_SEGMENT = 3
"""Points on each side; fewer cannot tell a move from an outlier."""
PENALTY = 1.5
"""Times log(points), in units of the variance of ranks: generous, as the test decides."""
ALPHA = 0.05
"""For one place, before all series are looked at together."""
ROUNDS = (199, 800, 3000)
"""Permutations, each lot drawn only while the result still looks significant."""
CHUNK = 2000
NEAR = 3.84
"""Chi-square of one degree of freedom at 95 %: cuts that fit no worse than this are not told apart."""


@dataclass(frozen=True, slots=True)
class Place:
    """A move between the points `index - 1` and `index`."""

    index: int
    p: float
    """The larger of the place's own and its series'."""
    before: tuple[int, int]
    """Points of the level before: from, to (not included)."""
    after: tuple[int, int]
    near: tuple[int, ...]
    """Every index at which the move may as well have been, `index` included."""


def find_places(values: Sequence[float], seed: int = 0) -> tuple[Place, ...]:
    """Places at which a series moved, each significant at 5 % in its surroundings."""
    points = np.asarray(values, dtype=np.float64)
    if len(points) < MIN_POINTS or np.ptp(points) == 0:
        return ()
    rng = np.random.default_rng(seed)
    cuts = _proposed(points)
    p_series = _p_value(points, _stretch_gain, rng) if cuts else 1.0
    if p_series > ALPHA:
        return ()
    tested: dict[tuple[int, int, int], float] = {}
    while cuts:
        bounds = [0, *cuts, len(points)]
        spans = [(bounds[i - 1], bounds[i], bounds[i + 1]) for i in range(1, len(bounds) - 1)]
        for span in spans:
            if span not in tested:
                tested[span] = _p_value(points[span[0] : span[2]], _split_gain, rng)
        worst = max(spans, key=lambda span: tested[span])
        if tested[worst] <= ALPHA:
            return _located(points, bounds, [max(p_series, tested[span]) for span in spans])
        cuts.remove(worst[1])
    return ()


def significant(p_values: Sequence[float], rate: float = ALPHA) -> tuple[bool, ...]:
    """Which of many places to report so that at most `rate` of them are expected to be false."""
    if not p_values:
        return ()
    return tuple(bool(q <= rate) for q in false_discovery_control(list(p_values), method="bh"))


def _proposed(points: Any) -> list[int]:
    try:
        from ruptures import KernelCPD  # type: ignore[import-untyped]  # ships no types; slow to import
    except ImportError as error:
        raise DeviceMissing(
            f"moves cannot be looked for: {error}; install the extra: pip install 'fasttrack[history]'"
        ) from error
    ranks = _standard_ranks(points)[:, None]
    search = KernelCPD(kernel="linear", min_size=MIN_SEGMENT).fit(ranks)
    return [int(cut) for cut in search.predict(pen=PENALTY * np.log(len(points)))[:-1]]


def _standard_ranks(points: Any) -> Any:
    ranks = rankdata(points)
    spread = ranks.std()
    return (ranks - ranks.mean()) / (spread or 1.0)


def _split_gains(standard: Any) -> Any:
    """For each split that leaves enough points on both sides, how much of the sum of squares it explains."""
    n = standard.shape[-1]
    splits = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    sums = np.cumsum(standard, axis=-1)[..., splits - 1]
    return sums**2 * n / (splits * (n - splits))


def _split_gain(standard: Any) -> Any:
    """The best split's gain, for each row of standardised points."""
    return _split_gains(standard).max(axis=-1)


def _stretch_gain(standard: Any) -> Any:
    """The gain of the stretch that lies most apart from the rest, for each row of standardised points."""
    n = standard.shape[-1]
    sums = np.concatenate([np.zeros_like(standard[..., :1]), np.cumsum(standard, axis=-1)], axis=-1)
    best = np.zeros(standard.shape[:-1])
    for size in range(MIN_SEGMENT, n - MIN_SEGMENT + 1):
        apart = np.abs(sums[..., size:] - sums[..., :-size]).max(axis=-1)
        best = np.maximum(best, apart**2 * n / (size * (n - size)))
    return best


def _p_value(points: Any, gain: Callable[[Any], Any], rng: Any) -> float:
    """Probability that shuffled points have a gain as large as that of these."""
    standard = _standard_ranks(points)
    best = float(gain(standard)) * (1 - 1e-9)  # equal sums differ in their last bits
    worse = drawn = 0
    for lot in ROUNDS:
        for start in range(0, lot, CHUNK):
            shuffled = rng.permuted(np.tile(standard, (min(CHUNK, lot - start), 1)), axis=1)
            worse += int((gain(shuffled) >= best).sum())
        drawn += lot
        if worse > 10:
            break
    return (worse + 1) / (drawn + 1)


def _located(points: Any, bounds: list[int], p_values: Sequence[float]) -> tuple[Place, ...]:
    """The places between `bounds`, each moved to where it fits best."""
    cuts, near = list(bounds), []
    for i in range(1, len(bounds) - 1):  # from the left, so that no place passes its neighbour
        cuts[i], others = _best_cuts(points, cuts[i - 1], cuts[i + 1])
        near.append(others)
    return tuple(
        Place(cuts[i], p, (cuts[i - 1], cuts[i]), (cuts[i], cuts[i + 1]), others)
        for i, (p, others) in enumerate(zip(p_values, near, strict=True), 1)
    )


def _best_cuts(points: Any, start: int, end: int) -> tuple[int, tuple[int, ...]]:
    """Where two medians fit the points from `start` to `end` best, and every cut that fits hardly worse."""
    cuts = range(start + MIN_SEGMENT, end - MIN_SEGMENT + 1)
    costs = np.array([_spread(points[start:cut]) + _spread(points[cut:end]) for cut in cuts])
    costs = np.maximum(costs, 1e-12 * np.abs(points[start:end]).sum())
    # Twice the logarithm of the likelihood ratio, for deviations from the median (Laplace).
    worse = 2 * (end - start) * np.log(costs / costs.min())
    return cuts[int(costs.argmin())], tuple(cuts[i] for i in np.flatnonzero(worse <= NEAR))


def _spread(points: Any) -> float:
    return float(np.abs(points - np.median(points)).sum())
