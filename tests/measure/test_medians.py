"""The interval of a median ratio: exact whatever the times look like, and open where pairs are too few."""

import random
from math import inf

import pytest

from harness.measure.medians import ends_place, least_pairs, median_ratio


def test_ends_are_the_order_statistics_of_a_fair_coin() -> None:
    # Of 8 coins, none or one head: 9/256 = 0.035; none, one or two: 37/256 = 0.14.
    assert [ends_place(8, alpha) for alpha in (0.2, 0.05, 0.01, 0.001)] == [2, 1, 0, None]


def test_the_ratio_is_the_median_of_pairs_and_its_ends_are_pairs() -> None:
    first, second = [8.0, 12.0, 10.0, 9.0, 40.0], [4.0, 4.0, 5.0, 3.0, 4.0]  # ratios 2, 3, 2, 3, 10
    found = median_ratio(first, second, alpha=0.05)
    assert (found.ratio, found.low, found.high) == (3.0, 2.0, 10.0)


def test_too_few_pairs_for_a_level_say_nothing() -> None:
    assert median_ratio([2.0] * 4, [1.0] * 4, alpha=0.01)[1:] == (0.0, inf)
    assert (least_pairs(0.05), least_pairs(0.01), least_pairs(0.001)) == (5, 7, 10)


def test_arms_of_different_length_make_no_pairs() -> None:
    with pytest.raises(ValueError, match="2 and 1 times make no pairs"):
        median_ratio([1.0, 2.0], [1.0], alpha=0.05)


def test_equal_arms_seem_faster_no_more_often_than_the_level() -> None:
    source = random.Random(5)
    wrong = 0
    for _ in range(2000):
        times = [[source.lognormvariate(0.0, 0.3) for _ in range(12)] for _ in range(2)]
        wrong += median_ratio(*times, alpha=0.05).low > 1.0
    # 12 pairs take the end below which 19.3 in 1000 fall (0, 1 or 2 heads); 3 standard deviations are 9 more.
    assert 10 / 1000 < wrong / 2000 < 29 / 1000
