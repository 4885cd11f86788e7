"""Which blocks of a cell are timed: as many as the plan asks for, fewer once the interval is narrow or the
time is spent; the planted arm only until it shows.

The rule reads the times alone, so that whoever judges the rows again can tell a run that stopped by it from
one whose blocks were chosen afterwards.
"""

from collections.abc import Callable, Mapping, Sequence

from harness.domain.check import Check
from harness.measure.interleaved import ABBA, Comparison, TimedUnit, compare

__all__ = ["stopping_fault", "time_blocks"]

LEAST = 8
"""Blocks before which nothing stops."""
PLANTED_LEAST = 4
"""Blocks that the planted arm takes part in at least: fewer cannot be compared."""
PLANTED = "slow"

Times = Mapping[str, Sequence[float]]
"""Microseconds of each arm in block order."""
Rule = Callable[[Check, Times, int], bool]
"""Whether something ends after so many blocks."""


def time_blocks(check: Check, units: Mapping[str, TimedUnit]) -> tuple[tuple[str, int, float], ...]:
    """(arm, block, us) in ABBA order until the rule ends it.

    Every arm does one unit before the first block, outside the samples: the first call of anything is slow.
    """
    for unit in units.values():
        unit()
    rows: list[tuple[str, int, float]] = []
    times: dict[str, list[float]] = {arm: [] for arm in units}
    active = set(units)
    for block in range(int(check.number("blocks"))):
        for arm in (arm for arm in ABBA[block % 2] if arm in active):
            times[arm].append(units[arm]())
            rows.append((arm, block, times[arm][-1]))
        if block % 2:
            if PLANTED in active and _shows(check, times, block + 1):
                active.remove(PLANTED)
            if _is_enough(check, times, block + 1):
                break
    return tuple(rows)


def stopping_fault(check: Check, times: Times, *, stops_early: bool) -> str | None:
    """Why no honest run ends after these blocks; None where one does."""
    planned, count = int(check.number("blocks")), len(times["stock"])
    if count != planned:
        said = f"{count} blocks were timed and the plan asks for {planned}"
        if count > planned or not stops_early:
            return said
        ends = _first(_is_enough, check, times, LEAST, count)
        if ends != count:
            why = f"its own rule stops after {ends}" if ends else "the interval is not narrow yet"
            return f"{said}{'; ' if ends else ', and '}{why}"
    shown = len(times[PLANTED])
    if shown != count and (not stops_early or _first(_shows, check, times, PLANTED_LEAST, shown) != shown):
        return f"the planted arm was timed in {shown} of {count} blocks, and its rule does not end there"
    return None


def _first(rule: Rule, check: Check, times: Times, least: int, last: int) -> int | None:
    """The first block count after which the rule holds."""
    return next((n for n in range(least, last + 1, 2) if rule(check, times, n)), None)


def _is_enough(check: Check, times: Times, blocks: int) -> bool:
    """Whether the intervals of the gain and of the noise are as narrow as the policy asks, or the time is
    spent.
    """
    if blocks < LEAST:
        return False
    spent_us = sum(sum(us[:blocks]) for us in times.values())
    if spent_us >= 1e6 * _seconds(check):
        return True
    found = (_compared(check, times, arm, blocks) for arm in ("optimised", "null"))
    return all(c.high - c.low < check.number("interval_width") * c.ratio for c in found)


def _shows(check: Check, times: Times, blocks: int) -> bool:
    """Whether the planted arm is slower for sure, by half of what was planted; never where the policy's
    interval has no width, which asks for every block of every arm.
    """
    if blocks < PLANTED_LEAST or not check.number("interval_width"):
        return False
    found = _compared(check, times, PLANTED, blocks)
    return found.high < 1 / (1 + check.number("planted_slowdown") / 2)


def _compared(check: Check, times: Times, arm: str, blocks: int) -> Comparison:
    return compare(times["stock"][:blocks], times[arm][:blocks], check.number("alpha"), seed=4 * blocks)


def _seconds(check: Check) -> float:
    """Timed seconds of a cell; without end in plans made before there was a limit."""
    return next((float(t.value) for t in check.thresholds if t.name == "time_s"), float("inf"))
