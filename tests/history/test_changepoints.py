"""Moves of a series are found where they are, and noise alone gives few."""

import sys

import numpy as np
import pytest

from harness.domain.errors import DeviceMissing
from harness.history.changepoints import find_places, significant


def _noise(points: int, seed: int) -> list[float]:
    return [float(v) for v in np.random.default_rng(seed).normal(size=points)]


def test_a_step_of_three_sigma_is_found_at_its_place() -> None:
    values = _noise(60, 1)
    values[36:] = [v + 3 for v in values[36:]]
    (place,) = find_places(values)
    assert (place.index, place.before, place.after) == (36, (0, 36), (36, 60))
    assert place.p < 0.001
    assert 36 in place.near


def test_two_steps_are_two_places() -> None:
    values = _noise(90, 2)
    values[30:60] = [v + 6 for v in values[30:60]]
    assert [p.index for p in find_places(values)] == [30, 60]


def test_a_small_step_names_every_place_that_it_may_be_at() -> None:
    values = _noise(60, 3)
    values[30:] = [v + 1.3 for v in values[30:]]
    (place,) = find_places(values)
    assert len(place.near) > 1
    assert 30 in place.near


def test_a_single_outlier_is_no_move() -> None:
    values = _noise(60, 4)
    values[30] = 1000.0
    assert find_places(values) == ()


def test_a_constant_that_becomes_another_constant_moved_at_once() -> None:
    (place,) = find_places([96.0] * 10 + [104.0] * 6)
    assert (place.index, place.near) == (10, (10,))


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 50, [1.0, 9.0] * 3, [0.0] * 4 + [1.0] * 5])
def test_a_constant_and_a_short_series_have_no_move(values: list[float]) -> None:
    assert find_places(values) == ()


def test_noise_alone_seldom_moves() -> None:
    """Gaussian and with heavy tails; over 80 series each the rate was 3.8 % at 20 points and 7.5 % at 60."""
    rng = np.random.default_rng(7)
    false = sum(bool(find_places(rng.normal(size=24))) for _ in range(30))
    false += sum(bool(find_places(rng.standard_cauchy(size=24))) for _ in range(30))
    assert false <= 3


def test_the_same_series_gives_the_same_places() -> None:
    values = _noise(50, 5)
    values[25:] = [v + 2 for v in values[25:]]
    assert find_places(values) == find_places(values)


def test_over_many_series_only_the_surest_places_are_kept() -> None:
    assert significant([0.0001, 0.04, 0.03]) == (True, True, True)
    assert significant([0.0001, 0.04, 0.03] + [1.0] * 7) == (True, False, False) + (False,) * 7
    assert significant([]) == ()


def test_without_ruptures_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(DeviceMissing, match=r"pip install 'fasttrack\[history\]'"):
        find_places([float(i) for i in range(20)])
