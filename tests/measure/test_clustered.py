"""Paired designs over 200 simulated experiments: a planted loss of three points, and arms that do not
differ.
"""

from collections import Counter

import numpy as np
import pytest

from harness.measure.clustered import compare_clusters
from harness.measure.paired import Pairs, Verdict, compare_pairs, excess_p, items_needed, power_at_margin

RUNS = 200
MARGIN, ALPHA, POWER = 0.03, 0.05, 0.8
SLACK = 0.08
"""Three standard errors of a share of 0.8 or 0.2 among 200."""


def _pairs(only_stock: float, only_optimised: float, n: int, seed: int) -> Counter[Verdict]:
    source = np.random.default_rng(seed)
    both = 0.9 - only_stock - only_optimised
    counts = source.multinomial(n, [both, only_stock, only_optimised, 0.1], size=RUNS)
    return Counter(compare_pairs(Pairs(*map(int, c)), MARGIN, ALPHA, POWER, ALPHA).verdict for c in counts)


def test_with_the_items_asked_for_equal_arms_pass_at_the_stated_power() -> None:
    n = items_needed(0.06, MARGIN, ALPHA, POWER, ALPHA)
    assert power_at_margin(n, 0.06, MARGIN, ALPHA) == pytest.approx(POWER, abs=0.01)
    found = _pairs(0.03, 0.03, n, seed=1)
    assert found[Verdict.NOT_WORSE] / RUNS > POWER - SLACK
    assert found[Verdict.WORSE] / RUNS < ALPHA + 0.05


def test_with_the_items_asked_for_a_planted_loss_of_the_margin_is_found_at_the_stated_power() -> None:
    n = items_needed(0.06, MARGIN, ALPHA, POWER, ALPHA)
    found = _pairs(0.045, 0.015, n, seed=2)
    assert found[Verdict.WORSE] / RUNS > POWER - SLACK
    assert found[Verdict.NOT_WORSE] / RUNS < ALPHA + 0.05


def test_equal_arms_are_called_worse_no_more_often_than_the_false_alarm_rate_even_with_many_items() -> None:
    source = np.random.default_rng(3)
    counts = source.multinomial(3000, [0.84, 0.03, 0.03, 0.1], size=RUNS)
    verdicts = [compare_pairs(Pairs(*map(int, c)), MARGIN, ALPHA, POWER, 0.01).verdict for c in counts]
    assert verdicts.count(Verdict.WORSE) <= 6
    assert verdicts.count(Verdict.NOT_WORSE) > 0.95 * RUNS


def _clustered(loss: float, problems: int, repeats: int, seed: int) -> Counter[Verdict]:
    """Problems of very different difficulty, equal for both arms but for the loss."""
    source = np.random.default_rng(seed)
    found: Counter[Verdict] = Counter()
    for run in range(RUNS):
        ease = source.beta(6, 1, problems)[:, None]
        stock = source.random((problems, repeats)) < ease
        optimised = source.random((problems, repeats)) < np.clip(ease - loss, 0, 1)
        differences = (optimised.astype(float) - stock).tolist()
        found[compare_clusters(differences, MARGIN, ALPHA, POWER, ALPHA, run).verdict] += 1
    return found


def test_repeats_of_thirty_problems_find_a_planted_loss_and_pass_equal_arms_at_the_stated_power() -> None:
    # ease 6/7 on average, so a pair of answers differs by 0.19 in the mean square: 2 x 0.094 / 30 / 72
    null = _clustered(0.0, 30, 72, seed=4)
    loss = _clustered(MARGIN, 30, 72, seed=5)
    assert null[Verdict.NOT_WORSE] / RUNS > POWER - SLACK
    assert null[Verdict.WORSE] / RUNS < ALPHA + 0.05
    assert loss[Verdict.WORSE] / RUNS > POWER - 1.5 * SLACK
    assert loss[Verdict.NOT_WORSE] / RUNS < ALPHA + 0.05


def test_too_few_repeats_stay_open_and_say_how_many_would_settle_it() -> None:
    source = np.random.default_rng(6)
    stock, optimised = source.random((2, 30, 8)) < 0.86
    found = compare_clusters((optimised.astype(float) - stock).tolist(), MARGIN, ALPHA, POWER, ALPHA, 0)
    assert found.verdict is Verdict.OPEN
    assert found.repeats_needed is not None
    assert 30 < found.repeats_needed < 150


def test_answers_that_never_differ_are_no_narrower_than_so_many_agreeing_pairs() -> None:
    z2 = 1.6448536269514722**2
    few = compare_clusters([[0.0]] * 30, MARGIN, ALPHA, POWER, ALPHA, 0)
    many = compare_clusters([[0.0] * 36] * 30, MARGIN, ALPHA, POWER, ALPHA, 0)
    assert few.low == pytest.approx(-z2 / (30 + z2))
    assert many.low == pytest.approx(-z2 / (1080 + z2))
    assert (few.verdict, many.verdict) == (Verdict.OPEN, Verdict.NOT_WORSE)


def test_a_steady_loss_is_worse_however_tight_the_interval_floor() -> None:
    assert compare_clusters([[-0.2] * 4] * 30, MARGIN, ALPHA, POWER, ALPHA, 0).verdict is Verdict.WORSE


def test_problems_that_truly_differ_cannot_be_settled_by_repeating_them() -> None:
    found = compare_clusters([[0.5] * 8, [-0.5] * 8] * 15, MARGIN, ALPHA, POWER, ALPHA, 0)
    assert found.verdict is Verdict.OPEN
    assert found.repeats_needed is None


def test_the_same_differences_give_the_same_interval() -> None:
    clusters = [[0.1, -0.2], [0.0, 0.3], [-0.1, 0.0]]
    first = compare_clusters(clusters, MARGIN, ALPHA, POWER, ALPHA, 9)
    assert first == compare_clusters(clusters, MARGIN, ALPHA, POWER, ALPHA, 9)


def test_a_bootstrap_needs_two_problems_with_answers() -> None:
    with pytest.raises(ValueError, match="two or more"):
        compare_clusters([[0.0]], MARGIN, ALPHA, POWER, ALPHA, 0)
    with pytest.raises(ValueError, match="two or more"):
        compare_clusters([[0.0], []], MARGIN, ALPHA, POWER, ALPHA, 0)


def test_an_excess_is_judged_by_the_pairs_that_differ() -> None:
    assert excess_p(0, 0) == 1.0
    assert excess_p(0, 5) == pytest.approx(1 / 32)
    assert excess_p(5, 0) == 1.0


def test_mcnemar_agrees_with_statsmodels() -> None:
    tables = pytest.importorskip(
        "statsmodels.stats.contingency_tables", reason="statsmodels is not installed"
    )
    theirs = tables.mcnemar([[80, 12], [4, 4]], exact=True).pvalue
    assert compare_pairs(Pairs(80, 12, 4, 4), MARGIN, ALPHA, POWER).mcnemar_p == pytest.approx(theirs)
