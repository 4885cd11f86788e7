"""Timed units of whole layers on a GPU: replays of a captured pass between two events.

A unit resets the residual stream outside the timed part, replays the pass a few times back to back and gives
microseconds a layer. `known_graph_times` asks the same units for busy waits whose length the host's clock
knows; `flushed_times` gives single passes behind a flush of the cache, which units of cold data must not
beat.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from harness.measure.interleaved import TimedUnit
from harness.measure.known_times import KnownTime

__all__ = [
    "card_uuid",
    "flushed_known_times",
    "flushed_times",
    "graph_unit",
    "known_graph_times",
    "slowed_unit",
]

SAMPLE_US = 4000.0
"""Length of one sample: long against the events' resolution, short against drifting clocks."""
MAX_REPLAYS = 100
SPIN_TRIAL_CYCLES = 2_000_000
KNOWN_PASS_US = (("short", 40.0), ("long", 2000.0))
"""A pass as short as one launch may be told from the next, and one of which few fill a sample."""
HOST_US = 20_000.0
"""Of one look at the host's clock: long against the wait for the device."""
TRIES, FLUSHES = 5, 5


def card_uuid() -> str:
    """The card that torch calls the first, by its own id."""
    return str(torch.cuda.get_device_properties(0).uuid)


def graph_unit(replay: Callable[[], None], reset: Callable[[], None], layers: int) -> TimedUnit:
    """A unit of as many passes as fill a sample; the number is fixed by a first, untimed one."""
    for _ in range(2):
        reset()
        replay()
    passes = max(1, min(MAX_REPLAYS, round(SAMPLE_US / _timed(replay, reset, 2))))
    return lambda: _timed(replay, reset, passes) / layers


def slowed_unit(
    replay: Callable[[], None], reset: Callable[[], None], layers: int, layer_us: float, share: float
) -> TimedUnit:
    """The same with `share` of a pass's time added behind each: a busy wait on the device."""
    cycles = int(_cycles_per_us() * share * layer_us * layers)

    def slowed() -> None:
        replay()
        _spin(cycles)

    return graph_unit(slowed, reset, layers)


def known_graph_times(layers: int) -> tuple[KnownTime, ...]:
    """Busy waits of the device by the host's clock, and as a unit tells them. The unit's reset takes as long
    as a sample.
    """
    rate = _cycles_per_us()
    found = []
    for name, pass_us in KNOWN_PASS_US:
        cycles = int(rate * pass_us)
        known = min(_host_us(cycles, round(HOST_US / pass_us)) for _ in range(TRIES))
        unit = graph_unit(partial(_spin, cycles), partial(_spin, int(rate * SAMPLE_US)), layers)
        found.append(KnownTime(name, known / layers, median(unit() for _ in range(TRIES))))
    return tuple(found)


def flushed_times(replay: Callable[[], None], reset: Callable[[], None], layers: int) -> tuple[float, ...]:
    """Microseconds a layer of single passes, each behind a read of more than the cache holds; a write would
    leave lines that the pass must wait for.
    """
    size = 3 * int(torch.cuda.get_device_properties(0).L2_cache_size)
    filler = torch.zeros(size, dtype=torch.uint8, device="cuda").view(torch.int32)
    _forget_persisting()

    def flush() -> None:
        reset()
        filler.amax()

    return tuple(_timed(replay, flush, 1) / layers for _ in range(FLUSHES))


def flushed_known_times(layers: int) -> tuple[float, ...]:
    """The same of the short known duration: what a single pass takes longer than one in a row, by itself."""
    cycles = int(_cycles_per_us() * KNOWN_PASS_US[0][1])
    return flushed_times(lambda: _spin(cycles), lambda: None, layers)


def _cycles_per_us() -> float:
    """Of the device's busy wait, by the host's clock."""
    return SPIN_TRIAL_CYCLES / min(_host_us(SPIN_TRIAL_CYCLES, 4) for _ in range(2))


def _host_us(cycles: int, count: int) -> float:
    """Microseconds of one busy wait among `count`, from an idle device to an idle device."""
    torch.cuda.synchronize()
    begun = time.perf_counter_ns()
    for _ in range(count):
        _spin(cycles)
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begun) / 1e3 / count


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types


def _forget_persisting() -> None:
    """Lines that somebody set aside would outlive the flush."""
    from harness.measure.driver import reset_persisting_l2

    reset_persisting_l2()


def _timed(replay: Callable[[], None], reset: Callable[[], None], passes: int) -> float:
    """Microseconds of one pass among `passes`."""
    begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
    reset()
    begun.record()
    for _ in range(passes):
        replay()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) * 1e3 / passes
