"""Timers are asked for known durations: what is told right, and what each mistake makes of it."""

import time
from collections.abc import Callable

import pytest

from harness.measure.interleaved import cpu_unit
from harness.measure.known_times import KnownTime, known_cpu_times, timer_fault


def test_the_processors_timer_tells_busy_waits_as_long_as_they_are() -> None:
    assert timer_fault(known_cpu_times(cpu_unit), 0.25) is None


@pytest.mark.parametrize("told", [899.0, 1101.0])
def test_a_timer_that_is_off_by_more_than_its_tolerance_is_named_with_both_times(told: float) -> None:
    words = timer_fault([KnownTime("short", 1000.0, told)], 0.1)
    assert words is not None
    assert words.startswith(f"the timer makes {told:.4g} us of 1000 us of work (short)")


def test_a_timer_within_its_tolerance_is_believed() -> None:
    assert timer_fault([KnownTime("short", 1000.0, 901.0), KnownTime("long", 4000.0, 4390.0)], 0.1) is None


def _with_set_up(work: Callable[[], object]) -> Callable[[], float]:
    def unit() -> float:
        begun = time.perf_counter_ns()
        time.sleep(0.002)
        work()
        return (time.perf_counter_ns() - begun) / 1e3

    return unit


def _halved(work: Callable[[], object]) -> Callable[[], float]:
    return lambda: cpu_unit(work)() / 2


@pytest.mark.parametrize("mistake", [_with_set_up, _halved])
def test_set_up_in_the_span_and_a_wrong_divisor_are_seen(
    mistake: Callable[[Callable[[], object]], Callable[[], float]],
) -> None:
    assert timer_fault(known_cpu_times(mistake), 0.1) is not None
