"""Holm's procedure, with the worked example of its paper's kind done by hand."""

import pytest

from harness.measure.statistics import holm


def test_holm_rejects_in_order_until_the_first_p_value_above_its_share() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, alpha=0.05)
    assert [found[name].is_rejected for name in "abcd"] == [True, False, False, True]
    assert found["d"].share == pytest.approx(0.0125)
    assert found["a"].share == pytest.approx(0.05 / 3)
    assert found["c"].share == pytest.approx(0.025)


def test_holm_stops_at_the_first_failure_even_when_a_later_p_value_is_below_its_own_share() -> None:
    found = holm({"first": 0.03, "second": 0.04}, alpha=0.05)
    assert not found["first"].is_rejected
    assert not found["second"].is_rejected


def test_holm_refuses_a_number_that_is_no_probability() -> None:
    with pytest.raises(ValueError, match="late"):
        holm({"late": 1.5}, alpha=0.05)
