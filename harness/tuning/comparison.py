"""From times in pairs to a comparison, and from comparisons to what becomes of a configuration. Pure."""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from harness.domain.tuning import Comparison
from harness.measure.medians import median_ratio

__all__ = ["compared", "is_surely_slower", "judge_held_out"]


def compared(incumbent_us: Sequence[float], other_us: Sequence[float], alpha: float) -> Comparison:
    """Incumbent over other, by the median of pairs."""
    found = median_ratio(incumbent_us, other_us, alpha)
    return Comparison(
        ratio=found.ratio, low=found.low, high=min(found.high, 1e9), incumbent_us=median(incumbent_us),
        other_us=median(other_us), pairs=len(incumbent_us), alpha=alpha,
    )  # fmt: skip


def is_surely_slower(early: Comparison, best_ratio: float) -> bool:
    """Whether early samples rule out that it beats the best so far."""
    return early.high < best_ratio


def judge_held_out(held_out: Comparison, null: Comparison) -> tuple[Literal["improved", "demoted"], str]:
    """Whether the winner of a search beats the incumbent by more than the noise floor on fresh repeats.

    The floor is how far the incumbent seems to be from itself in the same run, at the same level.
    """
    floor = max(null.high, 1.0 / null.low if null.low > 0 else 1e9, 1.0)
    words = (
        f"{held_out.ratio:.3f} ({held_out.low:.3f} to {held_out.high:.3f}) times as fast on held-out "
        f"repeats; the incumbent against itself reaches {floor:.3f}"
    )
    return ("improved", words) if held_out.low > floor else ("demoted", words)
