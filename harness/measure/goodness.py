"""Whether tokens were drawn with the probabilities that were stated for them.

A draw's place in the stated distribution, tokens ordered from likely to unlikely, is uniform where the stated
probabilities are the true ones (the probability integral transform; for a discrete distribution with a
uniform number inside the drawn token's own share). Kolmogorov and Smirnov's test looks for any deviation of
many such places from uniform, over contexts whose distributions all differ.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Draw", "stated_p", "uniform_number"]


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
    from scipy import stats  # takes 2 s to load; sampling does without

    places = [min(1.0, d.above + uniform_number(seed, n) * d.own) for n, d in enumerate(draws)]
    return float(stats.kstest(places, "uniform").pvalue)


def uniform_number(*key: int) -> float:
    """A number from 0 to 1 that depends on the key alone: the same on every machine, in every order."""
    text = ":".join(map(str, key)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7]) / 2**56
