"""Whether tokens were drawn with the probabilities that were stated for them.

A draw's place in the stated distribution, tokens ordered from likely to unlikely, is uniform where the stated
probabilities are the true ones (the probability integral transform; for a discrete distribution with a
uniform number inside the drawn token's own share). Kolmogorov and Smirnov's test looks for any deviation of
many such places from uniform, over contexts whose distributions all differ.
"""

import hashlib
from collections.abc import Sequence
from math import exp, lgamma, log
from typing import NamedTuple

__all__ = ["Draw", "stated_p", "uniform_number"]

FAR = 4.0
"""Number of places times distance squared, from which both sides at once are rarer than 1e-10 of either."""


class Draw(NamedTuple):
    """One drawn token under one stated distribution."""

    above: float
    """Probability of all tokens stated likelier than the drawn one."""
    own: float
    """Stated probability of the drawn token."""


def stated_p(draws: Sequence[Draw], seed: int) -> float:
    """p-value that all draws follow the stated probabilities; raises `ValueError` without draws.

    The number inside a token's share comes from the seed and the draw's place, so that judging again gives
    the same p-value.
    """
    if not draws:
        raise ValueError("a test of drawn tokens needs at least one")
    places = sorted(min(1.0, d.above + uniform_number(seed, n) * d.own) for n, d in enumerate(draws))
    count = len(places)
    distance = max(max((i + 1) / count - u, u - i / count) for i, u in enumerate(places))
    return _two_sided_p(count, distance)


def uniform_number(*key: int) -> float:
    """A number from 0 to 1 that depends on the key alone: the same on every machine, in every order."""
    text = ":".join(map(str, key)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7]) / 2**56


def _two_sided_p(count: int, distance: float) -> float:
    """Chance that as many uniform places lie as far from uniform, to about 10 digits. `scipy.stats` has it to
    six, and takes a second to load, which every verification would wait for.
    """
    if count * distance**2 >= FAR:
        return min(1.0, 2.0 * _one_sided_p(count, distance))
    return 1.0 - _share_nearer(count, distance)


def _one_sided_p(count: int, distance: float) -> float:
    """Chance that the places lie as far to one side: Smirnov's sum (Birnbaum and Tingey 1951, Annals of
    Mathematical Statistics 22:592).
    """
    total = 0.0
    for j in range(int(count * (1.0 - distance)) + 1):
        above, below = distance + j / count, 1.0 - distance - j / count
        if below > 0.0:
            ways = lgamma(count + 1) - lgamma(j + 1) - lgamma(count - j + 1)
            total += exp(ways + (j - 1) * log(above) + (count - j) * log(below))
    return distance * total


def _share_nearer(count: int, distance: float) -> float:
    """Chance that the places lie nearer (Marsaglia, Tsang and Wang 2003, Journal of Statistical Software
    8(18)): one entry of a power of a matrix, as long as twice the number of steps within the distance.
    """
    import numpy as np

    steps = int(count * distance) + 1
    size, rest = 2 * steps - 1, steps - count * distance
    lag = np.maximum(np.subtract.outer(np.arange(size), np.arange(size)) + 1, -1)
    matrix = (lag >= 0).astype(float)
    ends = rest ** np.arange(1.0, size + 1)
    matrix[:, 0] -= ends
    matrix[-1, :] -= ends[::-1]
    matrix[-1, 0] += max(0.0, 2.0 * rest - 1.0) ** size
    matrix /= np.array([*(exp(lgamma(min(n, 170) + 1)) for n in range(size + 1)), 1.0])[lag]
    power, scale = np.eye(size), 0.0
    for bit in f"{count:b}":
        power, scale = power @ power, 2 * scale
        power = power @ matrix if bit == "1" else power
        largest = float(np.abs(power).max())
        if largest == 0.0:
            return 0.0  # no places lie nearer than half a step
        power, scale = power / largest, scale + log(largest)
    return float(power[steps - 1, steps - 1]) * exp(lgamma(count + 1) - count * log(count) + scale)
