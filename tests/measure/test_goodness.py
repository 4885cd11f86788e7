"""Draws are held to the probabilities that were stated for them."""

import numpy as np
import pytest

from harness.measure.goodness import Draw, _two_sided_p, stated_p, uniform_number


def _draws(stated: list[float], true: list[float], n: int, seed: int) -> list[Draw]:
    source = np.random.default_rng(seed)
    above = [0.0, *np.cumsum(stated)[:-1]]
    return [Draw(above[t], stated[t]) for t in source.choice(len(stated), n, p=true)]


STATED = [0.6, 0.3, 0.1]


def test_draws_from_the_stated_probabilities_are_rejected_at_the_stated_rate() -> None:
    alarms = [stated_p(_draws(STATED, STATED, 300, seed), seed) < 0.05 for seed in range(200)]
    assert 0.005 < sum(alarms) / 200 < 0.1


def test_another_temperature_is_noticed() -> None:
    hotter = np.array(STATED) ** (1 / 1.5)
    assert stated_p(_draws(STATED, list(hotter / hotter.sum()), 1000, 1), 1) < 1e-4


def test_greedy_answers_are_no_draws() -> None:
    assert stated_p(_draws(STATED, [1.0, 0.0, 0.0], 100, 2), 2) < 1e-6


def test_a_test_without_draws_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stated_p([], 0)


def test_a_number_depends_on_its_key_alone() -> None:
    assert uniform_number(1, 2) == uniform_number(1, 2)
    assert uniform_number(1, 2) != uniform_number(2, 1)
    assert 0 <= uniform_number(7) < 1


@pytest.mark.parametrize(
    ("count", "distance", "chance"),
    [
        (1, 0.6, 0.8),  # 2 (1 - d)
        (2, 0.4, 0.82),  # 1 - 2 (2 d - 1/2)^2
        (2, 0.7, 0.18),  # 2 (1 - d)^2
        (100, 0.14, 0.0358251197),  # `kstwo.sf` of scipy, which is exact for 100 places
        (100, 0.25, 5.40887e-6),  # as above
    ],
)
def test_the_chance_of_a_distance_is_the_exact_one(count: int, distance: float, chance: float) -> None:
    assert _two_sided_p(count, distance) == pytest.approx(chance, rel=1e-5)


def test_the_chance_is_the_same_from_both_ways_of_finding_it() -> None:
    near, far = _two_sided_p(400, 0.0999999), _two_sided_p(400, 0.1)
    assert near == pytest.approx(far, rel=1e-4)
