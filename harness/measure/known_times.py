"""Whether a timer tells durations that are known: each timer is asked before its times are used.

Work of two known lengths is timed by the very units that time a cell. The short one is repeated many times
in one sample and shows what a unit adds to each repetition (a wait inside its loop); the long one is
repeated little and shows a wrong divisor; what must not be timed takes as long as the work, so that it shows
where a unit times it all the same. Pure, but for the busy wait of a processor.
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from harness.domain.table_shape import POSITIVE, TEXT, TableShape

__all__ = ["KNOWN_SHAPE", "KnownTime", "known_cpu_times", "spin", "timer_fault"]

KNOWN_SHAPE = TableShape({"name": TEXT, "known_us": POSITIVE, "told_us": POSITIVE}, key=("name",))
CPU_KNOWN_US = (("short", 250.0), ("long", 1000.0))
"""Shorter than a busy machine's scheduler lets a process run, so that some try is left alone."""
TRIES = 40
"""Of each length at most: the quickest counts, as a neighbour only lengthens."""
CLOSE = 0.02
"""No more tries where one was as close as this."""


class KnownTime(NamedTuple):
    """A duration, and what the timer made of it."""

    name: str
    known_us: float
    told_us: float


def known_cpu_times(unit_of: Callable[[Callable[[], object]], Callable[[], float]]) -> tuple[KnownTime, ...]:
    """Busy waits as `unit_of` times them."""
    found = []
    for name, us in CPU_KNOWN_US:
        unit, told = unit_of(partial(spin, us / 1e6)), math.inf
        for _ in range(TRIES):
            told = min(told, unit())
            if told <= us * (1 + CLOSE):
                break
        found.append(KnownTime(name, us, told))
    return tuple(found)


def spin(seconds: float) -> None:
    """Busy wait: a sleep would hand the core to the scheduler and come back late."""
    until = time.monotonic_ns() + int(seconds * 1e9)
    while time.monotonic_ns() < until:
        pass


def timer_fault(times: Iterable[KnownTime], tolerance: float) -> str | None:
    """Why a timer's times are none, in words; None where it told what was known."""
    for one in times:
        if abs(one.told_us - one.known_us) > tolerance * one.known_us:
            return (
                f"the timer makes {one.told_us:.4g} us of {one.known_us:.4g} us of work ({one.name}): it "
                "waits in its loop, times more or less than the work, or divides by a wrong number"
            )
    return None
