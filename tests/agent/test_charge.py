"""Many attempts cost: the levels of all together never exceed the one that was asked for."""

import pytest

from harness.agent.charge import blocks_for, charged_alpha


def test_attempts_of_a_budget_share_the_level_evenly() -> None:
    assert [charged_alpha(0.05, k, 5) for k in (1, 5)] == [0.01, 0.01]


def test_without_a_budget_the_levels_of_any_number_of_attempts_stay_below_the_whole() -> None:
    levels = [charged_alpha(0.05, k, None) for k in range(1, 1001)]
    assert levels[:3] == [0.05 / 2, 0.05 / 6, 0.05 / 12]
    assert 0.0499 < sum(levels) < 0.05


def test_an_attempt_beyond_the_budget_has_no_level() -> None:
    with pytest.raises(ValueError, match="attempt 6 is none of 5"):
        charged_alpha(0.05, 6, 5)


def test_a_stricter_level_takes_more_pairs() -> None:
    assert (blocks_for(0.05, 8), blocks_for(0.0005, 8), blocks_for(1e-30, 8)) == (11, 17, 64)
