"""Several questions at once: Holm's step-down procedure over the statistical checks of one verdict.

Holm (1979), Scandinavian Journal of Statistics 6:65: holds the chance of any false alarm at `alpha`, whatever
the dependence between the tests. Intervals of single comparisons live beside what they compare (`paired`,
`interleaved`).
"""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["HolmStep", "holm"]


class HolmStep(NamedTuple):
    """One test's place in the procedure."""

    p: float
    share: float
    """The level that it was tested at: `alpha` over the number of tests not yet rejected."""
    is_rejected: bool


def holm(p_values: Mapping[str, float], alpha: float) -> dict[str, HolmStep]:
    """Which tests are rejected so that any false rejection has a chance of at most `alpha`.

    Raises `ValueError` for a p-value outside 0..1.
    """
    wrong = [name for name, p in p_values.items() if not 0 <= p <= 1]
    if wrong:
        raise ValueError(f"p-values lie in 0..1; {', '.join(wrong)} do not")
    found: dict[str, HolmStep] = {}
    is_open = True
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        share = alpha / (len(p_values) - place)
        is_open = is_open and p <= share
        found[name] = HolmStep(p, share, is_open)
    return {name: found[name] for name in p_values}
