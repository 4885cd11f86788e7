"""Timed units of whole layers on a GPU: replays of a captured pass between two events.

A unit resets the residual stream outside the timed part, replays the pass a few times back to back and gives
microseconds a layer.
"""

from collections.abc import Callable

import torch

from harness.measure.interleaved import TimedUnit

__all__ = ["graph_unit", "slowed_unit"]

SAMPLE_US = 4000.0
"""Length of one sample: long against the events' resolution, short against drifting clocks."""
MAX_REPLAYS = 100
SPIN_TRIAL_CYCLES = 2_000_000


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
    spin_us = _timed(lambda: _spin(SPIN_TRIAL_CYCLES), lambda: None, 1)
    cycles = int(SPIN_TRIAL_CYCLES * share * layer_us * layers / spin_us)

    def slowed() -> None:
        replay()
        _spin(cycles)

    return graph_unit(slowed, reset, layers)


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types


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
