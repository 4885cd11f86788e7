"""Like work on a clock that no candidate holds: each difference has its own verdict."""

from collections.abc import Callable
from typing import Any

import pytest

from harness.domain.check import Samples, SampleTable, Status
from harness.domain.machine import Tier
from harness.executors.marks import Marks, stretch
from harness.stages.sweep import judge
from harness.stages.sweep.likeness import expert_rows
from tests.stages.spoiled_tables import with_rows
from tests.stages.sweep.test_sweep import _check, _samples


def rows_of(samples: Samples, table: str) -> tuple[Any, ...]:
    found = samples.table(table)
    assert found is not None
    return found.rows


def test_a_worker_whose_clock_runs_slow_is_invalid_by_the_clock_outside() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    slow = tuple((a, b, us * 100 if a == "optimised" else us) for a, b, us in rows_of(honest, "timings"))
    outside = tuple((f"{arm}.{block}", us * 1000) for arm, block, us in slow)
    told = tuple((arm, block, us * 1000) for arm, block, us in rows_of(honest, "timings"))
    lying = with_rows(with_rows(honest, "outside", outside), "timings", told)
    outcome = judge(check, lying)
    assert outcome.status is Status.INVALID
    assert "40 of 40 units of arm optimised took another time by the clock outside" in outcome.summary


def test_a_short_step_that_is_told_shorter_than_it_was_is_invalid_beside_stocks_own_gap() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    said = rows_of(honest, "timings")
    outside = tuple((f"{arm}.{block}", us + 300.0) for arm, block, us in said)
    told = tuple((a, b, us * 0.7 if a == "optimised" else us) for a, b, us in said)
    assert judge(check, with_rows(honest, "outside", outside)).status is Status.PASS
    outcome = judge(check, with_rows(with_rows(honest, "outside", outside), "timings", told))
    assert outcome.status is Status.INVALID
    assert outcome.summary == (
        "arm optimised is told 15 us shorter a unit than stock is, by the clock outside of the worker "
        "(10 us allowed)"
    )


def told_by_the_clocks(honest: Samples, us: Callable[[str, int], tuple[float, float]]) -> Samples:
    """The samples with each unit, (by the worker's clock, by the one outside), as `us` has it."""
    pairs = [(arm, block, *us(arm, block)) for arm, block, _ in rows_of(honest, "timings")]
    outside = tuple((f"{arm}.{block}", seen) for arm, block, _, seen in pairs)
    return with_rows(with_rows(honest, "timings", tuple(p[:3] for p in pairs)), "outside", outside)


ARMS = {"stock": 100.0, "optimised": 100.0, "null": 100.0, "slow": 160.0}
SCATTERED = (49.0, 0.0, 96.5, 49.0, 0.0, 96.5, 49.0)
"""What a unit is told shorter: its median is its scatter, so that an arm's own scatter would excuse it."""


def test_an_arm_as_slow_as_stock_that_is_told_shorter_by_scattered_amounts_is_invalid() -> None:
    check = _check()

    def us(arm: str, block: int) -> tuple[float, float]:
        real = ARMS[arm] + block % 2
        return real - (SCATTERED[block % 7] if arm == "optimised" else 0.0), real + 300

    outcome = judge(check, told_by_the_clocks(_samples(check, 50.0), us))
    assert outcome.status is Status.INVALID
    assert outcome.summary == (
        "arm optimised is told 49 us shorter a unit than stock is, by the clock outside of the worker "
        "(10 us allowed)"
    )


def test_an_arm_told_truly_in_most_units_and_shorter_in_its_slow_ones_is_invalid_by_its_median() -> None:
    """Half of the units take 60 us and half 140 us, in the middle 100; 19 of the long ones are told as 40."""
    check = _check()

    def us(arm: str, block: int) -> tuple[float, float]:
        real = (60.0, 140.0)[block % 2] if arm in ("stock", "optimised", "null") else 260.0
        is_lie = arm == "optimised" and block % 2 == 1 and block > 2
        return (40.0 if is_lie else real), real + 300

    outcome = judge(check, told_by_the_clocks(_samples(check, 50.0), us))
    assert outcome.status is Status.INVALID
    assert "arm optimised is told 40 us shorter a unit than stock is" in outcome.summary


@pytest.mark.parametrize("arms", [("stock", "optimised", "null", "slow"), ("optimised",)])
def test_a_clock_outside_that_is_unsteady_beside_a_unit_decides_nothing_whoever_made_it_so(
    arms: tuple[str, ...],
) -> None:
    """Half of the words come 40 us late: 20 us of scatter are known to 33 us only by 40 units."""
    check = _check()

    def us(arm: str, block: int) -> tuple[float, float]:
        told = (50.0 if arm == "optimised" else ARMS[arm]) + block % 2
        late = (-20.0, 20.0)[block // 2 % 2] if arm in arms else 0.0
        return told, told + 300 + late

    outcome = judge(check, told_by_the_clocks(_samples(check, 50.0), us))
    assert outcome.status is Status.INCONCLUSIVE
    assert f"adds to units of arm {arms[0]} is known to 33 us only (10 us asked)" in outcome.summary


def test_some_units_that_the_listener_noted_late_do_not_make_a_run_invalid() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    late = tuple(
        (name, us + (90_000 if name.endswith("3") else 0)) for name, us in rows_of(honest, "outside")
    )
    assert judge(check, with_rows(honest, "outside", late)).status is Status.PASS


def test_a_unit_that_no_clock_outside_saw_makes_the_run_invalid() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    rest = tuple(row for row in rows_of(honest, "outside") if row[0] != "slow.7")
    outcome = judge(check, with_rows(honest, "outside", rest))
    assert outcome.status is Status.INVALID
    assert "not every unit of arm slow" in outcome.summary


def test_prompts_out_of_the_prefix_cache_make_the_run_invalid() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    rows = tuple(
        (a, 4, 4, 252) if a == "optimised" else (a, *rest) for a, *rest in rows_of(honest, "prefixes")
    )
    outcome = judge(check, with_rows(honest, "prefixes", rows))
    assert outcome.status is Status.INVALID
    assert "4 of 4 prompts of arm optimised came from the prefix cache (252 tokens)" in outcome.summary


def test_counters_that_do_not_rise_where_a_prompt_came_twice_prove_nothing() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    rows = tuple((a, q, 0, 0) for a, q, _, _ in rows_of(honest, "prefixes"))
    outcome = judge(check, with_rows(honest, "prefixes", rows))
    assert outcome.status is Status.NO_EVIDENCE
    assert "counters did not rise" in outcome.summary


def test_a_clock_outside_that_does_not_see_the_planted_slow_down_decides_nothing() -> None:
    check = _check()
    honest = _samples(check, 50.0)
    flat = tuple((name, 100.0) for name, _ in rows_of(honest, "outside"))
    outcome = judge(check, with_rows(honest, "outside", flat))
    assert outcome.status is Status.INCONCLUSIVE
    assert "did not see the planted slow-down" in outcome.summary


@pytest.mark.parametrize(
    ("experts", "status"),
    [
        (tuple(("stock", 64, e, 1) for e in range(12)), Status.PASS),
        (tuple(("stock", 64, e, 8) for e in range(2)), Status.NO_EVIDENCE),  # of about 14 by chance
    ],
)
def test_eight_rows_must_choose_about_as_many_experts_as_an_even_router(
    experts: tuple[Any, ...], status: Status
) -> None:
    check = _check()
    assert check.cell is not None
    crowd = check.model_copy(update={"cell": check.cell.model_copy(update={"batch": 8})})
    both = (*experts, *(("optimised", *row[1:]) for row in experts))
    samples = _samples(crowd, 50.0)
    work = tuple((*kind, 8 * tokens) for *kind, tokens in rows_of(samples, "steps"))
    crowded = with_rows(with_rows(samples, "steps", work), "experts", both)
    assert judge(crowd, crowded).status is status


class Router:
    """The one question of a session that the histogram needs."""

    def expert_choices(self) -> tuple[int, list[list[int]]]:
        return 8, [[3, 1], [3, 7]]


def test_the_histogram_counts_the_rows_of_each_expert() -> None:
    sessions: Any = {"stock": Router(), "optimised": Router()}
    assert list(expert_rows(sessions))[:3] == [("stock", 8, 1, 1), ("stock", 8, 3, 2), ("stock", 8, 7, 1)]


def test_marks_note_each_stretch_once_and_replace_what_the_samples_say_themselves() -> None:
    marks = Marks()
    with stretch(marks.add, "stock.0"):
        pass
    with stretch(marks.add, "stock.0"):
        pass
    marks.add("end never")
    own = SampleTable(name="outside", columns=("name", "us"), rows=(("stock.0", 1e-30),))
    samples = marks.attach(Samples(check="sweep/x", tier=Tier.SMOKE, tables=(own,)))
    (table,) = samples.tables
    ((name, us),) = table.rows
    assert name == "stock.0"
    assert isinstance(us, float)
    assert us > 1e-3


def test_samples_without_marks_lose_what_they_say_of_a_clock_outside() -> None:
    own = SampleTable(name="outside", columns=("name", "us"), rows=(("stock.0", 5.0),))
    assert Marks().attach(Samples(check="sweep/x", tier=Tier.SMOKE, tables=(own,))).tables == ()
