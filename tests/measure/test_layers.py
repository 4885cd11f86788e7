"""Timers of whole layers on a played device: what they tell of known work, and of data that stays cached."""

from collections.abc import Callable

import pytest

from harness.measure import layers
from harness.measure.known_times import timer_fault
from tests.fakes.played_device import DRAM_BYTES_PER_US, L2_BYTES_PER_US, PlayedDevice, played


def _pass(device: PlayedDevice, names: list[str], size: float) -> Callable[[], None]:
    def replay() -> None:
        device.launch(0.0)
        for name in names:
            device.read(name, size)

    return replay


def test_known_durations_are_told_to_half_a_per_cent() -> None:
    with played():
        found = {one.name: one for one in layers.known_graph_times(8)}
    assert found["short"].told_us == pytest.approx(40 / 8, rel=0.005)
    assert found["long"].told_us == pytest.approx(2000 / 8, rel=0.005)
    assert timer_fault(found.values(), 0.1) is None


def test_the_planted_slow_down_takes_its_share_of_a_pass() -> None:
    with played() as device:
        slow = layers.slowed_unit(lambda: device.launch(800.0), lambda: None, 8, 100.0, 0.6)
        assert slow() == pytest.approx(160.0, rel=0.01)


def test_weights_that_rotate_past_the_cache_take_the_same_behind_a_flush() -> None:
    """Eight sets of 40 MB do not fit in 50 MB."""
    with played() as device:
        work = _pass(device, [f"set{n}" for n in range(8)], 40e6)
        in_a_row = layers.graph_unit(work, lambda: None, 8)()
        flushed = layers.flushed_times(work, lambda: None, 8)
    assert in_a_row == pytest.approx(40e6 / DRAM_BYTES_PER_US, rel=0.01)
    assert flushed == pytest.approx([in_a_row] * layers.FLUSHES, rel=0.01)


def test_one_set_for_all_layers_is_read_from_the_cache_and_the_flush_shows_it() -> None:
    with played() as device:
        work = _pass(device, ["one"] * 8, 40e6)
        in_a_row = layers.graph_unit(work, lambda: None, 8)()
        flushed = layers.flushed_times(work, lambda: None, 8)
    assert in_a_row == pytest.approx(40e6 / L2_BYTES_PER_US, rel=0.01)
    first_us = 40e6 / DRAM_BYTES_PER_US - 40e6 / L2_BYTES_PER_US
    assert (min(flushed) - in_a_row) * 8 == pytest.approx(first_us, rel=0.2)
