"""Paired intervals keep their coverage, and verdicts their error rates."""

import random
import subprocess
import sys

import pytest

from harness.measure.paired import Pairs, Verdict, compare_pairs, excess_p, items_needed, tango_interval


def test_no_disagreement_gives_the_closed_form_interval() -> None:
    low, high = tango_interval(Pairs(8, 0, 0, 0), 0.05)
    z2 = 1.6448536269514722**2
    assert low == pytest.approx(-z2 / (8 + z2), abs=1e-6)
    assert high == pytest.approx(z2 / (8 + z2), abs=1e-6)


def test_the_interval_mirrors_when_the_arms_change_places() -> None:
    low, high = tango_interval(Pairs(40, 6, 2, 2), 0.05)
    mirrored_low, mirrored_high = tango_interval(Pairs(40, 2, 6, 2), 0.05)
    assert (low, high) == pytest.approx((-mirrored_high, -mirrored_low), abs=1e-6)


def test_an_interval_without_items_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        tango_interval(Pairs(0, 0, 0, 0), 0.05)


def test_each_end_misses_the_true_difference_about_alpha_of_the_time() -> None:
    source = random.Random(5)
    low_misses = high_misses = 0
    runs = 600
    for _ in range(runs):
        counts = [0, 0, 0, 0]
        for _ in range(120):
            counts[source.choices(range(4), weights=(0.80, 0.08, 0.04, 0.08))[0]] += 1
        low, high = tango_interval(Pairs(*counts), 0.05)
        low_misses += low > -0.04
        high_misses += high < -0.04
    assert low_misses / runs < 0.08
    assert high_misses / runs < 0.08


def test_a_clear_loss_is_worse_and_a_small_sample_is_open() -> None:
    assert compare_pairs(Pairs(80, 12, 2, 6), 0.03, 0.05, 0.8).verdict is Verdict.WORSE
    assert compare_pairs(Pairs(20, 1, 1, 2), 0.03, 0.05, 0.8).verdict is Verdict.OPEN
    assert compare_pairs(Pairs(90, 0, 0, 0), 0.03, 0.05, 0.8).verdict is Verdict.NOT_WORSE


def test_items_needed_is_where_a_clean_run_first_excludes_the_margin() -> None:
    needed = items_needed(0.0, 0.03, 0.05, 0.8)
    assert needed == 88
    assert tango_interval(Pairs(needed, 0, 0, 0), 0.05)[0] > -0.03
    assert tango_interval(Pairs(needed - 1, 0, 0, 0), 0.05)[0] <= -0.03


@pytest.mark.parametrize(
    ("only_stock", "only_optimised", "chance"),
    [(0, 0, 1.0), (0, 3, 0.125), (3, 0, 1.0), (2, 2, 11 / 16), (1, 9, 11 / 1024)],
)
def test_an_excess_has_the_chance_of_as_many_heads(
    only_stock: int, only_optimised: int, chance: float
) -> None:
    assert excess_p(only_stock, only_optimised) == pytest.approx(chance, rel=1e-12)


def test_mcnemar_s_value_doubles_the_rarer_side_and_never_passes_one() -> None:
    assert compare_pairs(Pairs(10, 1, 9, 0), 0.05, 0.05, 0.8).mcnemar_p == pytest.approx(22 / 1024)
    assert compare_pairs(Pairs(10, 2, 2, 0), 0.05, 0.05, 0.8).mcnemar_p == 1.0


def test_judging_pairs_and_draws_loads_no_scipy() -> None:
    code = (
        "import sys; from harness.measure import goodness, paired;"
        "paired.compare_pairs(paired.Pairs(40, 6, 2, 2), 0.05, 0.05, 0.8);"
        "goodness.stated_p([goodness.Draw(0.2, 0.5)] * 9, 1); sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
