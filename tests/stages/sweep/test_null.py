"""Stock against itself: when a repeat is a false alarm, and how many of them are too many."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.domain.check import Status
from harness.domain.null_run import NullRepeat, NullRun
from harness.domain.resources import data_folder
from harness.stages.sweep.null import null_check, null_repeat, null_repeats, rejudged, stock_units
from tests.fakes.pack import FakePack
from tests.fakes.requests import MACHINE, stage_context
from tests.stages.sweep.test_sweep import _check

TIMES = tuple(100.0 + block % 2 for block in range(8))


def _times(factor: float) -> dict[str, tuple[float, ...]]:
    slower = tuple(us * factor for us in TIMES)
    return {"stock": TIMES, "optimised": slower, "null": TIMES, "slow": tuple(us * 1.6 for us in TIMES)}


def _run(*repeats: NullRepeat) -> NullRun:
    return NullRun(
        harness_digest="a" * 64, created=datetime(2026, 11, 30, tzinfo=UTC), machine=MACHINE,
        check=null_check(_check()), work="eight numbers", repeats=repeats,
    )  # fmt: skip


def test_equal_arms_pass_at_no_gain_and_a_slower_copy_of_stock_is_a_false_alarm() -> None:
    check = null_check(_check())
    same, slower = (null_repeat(check, _times(factor)) for factor in (1.0, 1.3))
    assert (same.status, same.ratio, same.is_planted_seen) == (Status.PASS, 1.0, True)
    assert slower.status is Status.FAIL
    assert slower.excludes_one


@pytest.mark.parametrize(("alarms", "is_inside"), [(0, True), (5, True), (6, False)])
def test_at_five_per_cent_five_alarms_of_fifty_are_no_surprise_and_six_are(
    alarms: int, is_inside: bool
) -> None:
    """Binomial: 5 or more of 50 at 0.05 come with a chance of 0.104, 6 or more with 0.038."""
    check = null_check(_check())
    repeats = [null_repeat(check, _times(1.3 if n < alarms else 1.0)) for n in range(50)]
    found = _run(*repeats)
    assert found.is_inside is is_inside
    assert found.words().startswith(f"{alarms} of 50 runs of stock against itself are false alarms")


def test_equal_work_in_other_memory_is_no_alarm_where_the_least_noise_covers_it() -> None:
    """0.4 % slower, told to the last digit; a plan from before `min_noise` accuses."""
    check = null_check(_check(min_noise=0.005))
    older = check.model_copy(
        update={"thresholds": tuple(t for t in check.thresholds if t.name != "min_noise")}
    )
    steady = {arm: tuple(100.0 for _ in range(8)) for arm in ("stock", "null")}
    times = {**steady, "optimised": (100.4,) * 8, "slow": (160.0,) * 8}
    assert null_repeat(check, times).status is Status.PASS
    assert null_repeat(older, times).status is Status.FAIL


def test_a_record_is_judged_by_its_times_and_not_by_what_it_says() -> None:
    check = null_check(_check())
    lying = null_repeat(check, _times(1.3)).model_copy(update={"status": Status.PASS})
    assert rejudged(_run(lying)).alarms == 1


def test_four_sessions_of_stock_are_timed_as_the_arms_of_a_cell_are(tmp_path: Path) -> None:
    check = null_check(_check(interval_width=10.0))
    context = stage_context(FakePack(), tmp_path)
    (repeat,) = null_repeats(check, lambda: stock_units(check, context), 1)
    assert [len(times) for times in repeat.times_us] == [8, 8, 8, len(repeat.times_us[3])]


@pytest.mark.parametrize(
    "path", sorted(data_folder("bundles").glob("null/*.json")), ids=lambda path: path.stem
)
def test_a_committed_record_of_fifty_is_judged_alike_today_and_stays_inside_its_rate(path: Path) -> None:
    kept = NullRun.from_json(path.read_bytes())
    again = rejudged(kept)
    assert len(kept.repeats) == 50
    assert [one.status for one in again.repeats] == [one.status for one in kept.repeats]
    assert again.is_inside
    assert all(one.is_planted_seen for one in again.repeats)
