"""What many attempts cost: each one is judged at a smaller share of the level, so that all together keep it.

With attempts of one budget, each gets an equal share (Bonferroni). Without one, attempt k gets alpha / (k (k
+ 1)), which sums to alpha over any number of attempts. Nobody gains by trying again until chance helps.
"""

from harness.measure.medians import least_pairs

__all__ = ["MOST_BLOCKS", "blocks_for", "charged_alpha"]

MOST_BLOCKS = 64


def charged_alpha(alpha: float, attempt: int, budget: int | None) -> float:
    """The level of one attempt, counted from 1; raises `ValueError` for one beyond the budget."""
    if attempt < 1 or (budget is not None and attempt > budget):
        raise ValueError(f"attempt {attempt} is none of {budget or 'any'}")
    return alpha / budget if budget is not None else alpha / (attempt * (attempt + 1))


def blocks_for(alpha: float, wanted: int) -> int:
    """Pairs of windows that a comparison at this level takes: enough that both ends of its interval exist,
    and a few more.
    """
    return min(MOST_BLOCKS, max(wanted, least_pairs(alpha) + 6))
