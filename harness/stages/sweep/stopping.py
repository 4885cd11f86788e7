"""When a cell has been timed in enough blocks: as many as the plan asks for, or fewer once the interval is
narrow.

The rule is pure, so that whoever judges the rows again can tell a run that stopped by it from one whose
blocks were chosen afterwards.
"""

from collections.abc import Callable, Mapping, Sequence

from harness.domain.check import Check
from harness.measure.interleaved import compare

__all__ = ["is_narrow", "stopping_fault"]

LEAST = 8
"""Blocks before which nothing stops."""


def is_narrow(check: Check) -> Callable[[Sequence[tuple[str, int, float]]], bool]:
    """Whether the ratio's interval is as narrow as the policy asks."""

    def enough(rows: Sequence[tuple[str, int, float]]) -> bool:
        stock, optimised = ([us for a, _, us in rows if a == arm] for arm in ("stock", "optimised"))
        return _is_narrow(check, stock, optimised, len(rows))

    return enough


def stopping_fault(check: Check, times: Mapping[str, Sequence[float]], *, stops_early: bool) -> str | None:
    """Why no honest run ends after these blocks (each arm's times in block order); None where one does."""
    planned, count = int(check.number("blocks")), len(times["stock"])
    if count == planned:
        return None
    said = f"{count} blocks were timed and the plan asks for {planned}"
    if count > planned or not stops_early:
        return said
    ends = [n for n in range(LEAST, count + 1, 2) if _narrow_after(check, times, n)]
    if not ends or ends[0] != count:
        first = f"; its own rule stops after {ends[0]}" if ends else ", and the interval is not narrow yet"
        return said + first
    return None


def _narrow_after(check: Check, times: Mapping[str, Sequence[float]], blocks: int) -> bool:
    return _is_narrow(check, times["stock"][:blocks], times["optimised"][:blocks], blocks * len(times))


def _is_narrow(check: Check, stock: Sequence[float], optimised: Sequence[float], rows: int) -> bool:
    if len(stock) < LEAST:
        return False
    found = compare(stock, optimised, check.number("alpha"), seed=rows)
    return found.high - found.low < check.number("interval_width") * found.ratio
