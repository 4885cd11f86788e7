"""Trends, moves, flaky checks and catch rates over bundles whose story is known."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Status
from harness.domain.errors import InputError
from harness.domain.faults import FaultCell, FaultResult, FaultScore, Sighting
from harness.domain.machine import Machine, Tier
from harness.history import Index, open_index
from harness.history.catches import catch_rates
from harness.history.flaky import find_flaky
from harness.history.moves import find_moves
from harness.history.series import Selection, better, trends
from tests.evidence.example_run import example_machine
from tests.history.many_bundles import RATIO, START, Run, outcome, write_bundles, write_small

WOBBLE = (0.0, 0.011, -0.008, 0.004, -0.012, 0.007, -0.003, 0.009, -0.006, 0.002)
"""Noise without a random generator."""


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[Callable[[int, Callable[[int], Run]], Index]]:
    with open_index(tmp_path / "index.duckdb") as index:

        def make(count: int, of: Callable[[int], Run]) -> Index:
            write_bundles(tmp_path / "bundles", count, of)
            index.refresh(tmp_path / "bundles")
            return index

        yield make


def _slower_after(day: int, **more: Any) -> Callable[[int], Run]:
    """A ratio of 1.5 before a day and of 1.4 from it on; pull request 1000 + day."""
    return lambda d: {"ratio": (1.5 if d < day else 1.4) + WOBBLE[d % 10], "pr": 1000 + d, **more}


def test_a_trend_holds_a_check_s_points_by_time_with_their_bundles(indexed: Any) -> None:
    index = indexed(10, lambda day: {"ratio": 2.0 if day < 2 else 1.0, "pr": day})
    (found,) = trends(index, Selection(metrics=("ratio",)))
    assert (found.key.check, found.key.metric, found.key.machine) == (RATIO, "ratio", "Example CPU, 2 cores")
    assert [p.value for p in found.points] == [2.0, 2.0] + [1.0] * 8
    assert [p.pr for p in found.points] == list(range(10))
    assert found.points[0].created_us == int(START.timestamp() * 1e6)
    assert (found.median_first, found.median_last, found.change) == (2.0, 1.0, -0.5)


def test_machines_do_not_share_a_series(indexed: Any) -> None:
    def machine(day: int) -> Machine:
        return example_machine(gpu=day % 2 == 1)

    index = indexed(6, lambda day: {"machine": machine(day)})
    found = trends(index, Selection(metrics=("ratio",)))
    assert [(t.key.machine, len(t.points)) for t in found] == [
        ("1 x NVIDIA H200", 3), ("Example CPU, 2 cores", 3),
    ]  # fmt: skip
    assert len(trends(index, Selection(metrics=("ratio",), machine="H200"))) == 1


@pytest.mark.parametrize(
    "left_out", [{"is_dirty": True}, {"status": Status.NO_EVIDENCE}, {"status": Status.INVALID}]
)
def test_uncommitted_code_and_what_proves_nothing_have_no_point(left_out: Run, indexed: Any) -> None:
    index = indexed(4, lambda day: left_out if day == 3 else {})
    (found,) = trends(index, Selection(metrics=("ratio",)))
    assert len(found.points) == 3


def test_only_the_newest_points_are_taken(indexed: Any) -> None:
    index = indexed(6, lambda day: {"ratio": float(day + 1)})
    (found,) = trends(index, Selection(metrics=("ratio",), last=2))
    assert [p.value for p in found.points] == [5.0, 6.0]


def test_an_unknown_metric_and_an_odd_number_of_points_are_bad_input(indexed: Any) -> None:
    index = indexed(1, lambda day: {})
    with pytest.raises(InputError, match="there are optimised_relative_l2, optimised_us, path_share, ratio"):
        trends(index, Selection(metrics=("speed",)))
    with pytest.raises(InputError, match="--last 0 is out of range"):
        trends(index, Selection(last=0))


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        ("ratio", "higher"), ("verify_steps_per_s", "higher"), ("path_share", "higher"),
        ("score_difference", "higher"), ("optimised_us", "lower"), ("spill_bytes", "lower"),
        ("optimised_relative_l2", "lower"), ("worst_kl_to_stock", "lower"), ("clean_kl", "lower"),
        ("stock_us", "neither"), ("null_ratio", "neither"), ("poison_kl", "neither"), ("items", "neither"),
        ("stock_relative_l2", "neither"), ("smallest_noticed_out", "neither"),
    ],
)  # fmt: skip
def test_which_way_is_better_follows_from_the_name(metric: str, way: str) -> None:
    assert better(metric) == way


def test_a_regression_names_the_pull_request_of_the_first_slow_bundle(indexed: Any) -> None:
    index = indexed(200, _slower_after(120))
    found = find_moves(index, Selection())
    assert (found.series, found.too_short) == (4, 0)
    (move,) = found.moves
    assert (move.kind, move.key.metric, move.cause.pr) == ("regression", "ratio", 1120)
    assert (round(move.before, 9), round(move.after, 9)) == (1.501, 1.401)
    assert (move.points_before, move.points_after) == (120, 80)
    assert [c.pr for c in move.candidates] == [1120]
    assert move.also_changed == ()


def test_a_small_move_is_left_out_and_a_move_upwards_is_an_improvement(indexed: Any) -> None:
    index = indexed(40, lambda d: {"ratio": (1.4 if d < 20 else 1.5) + WOBBLE[d % 10]})
    assert [m.kind for m in find_moves(index, Selection()).moves] == ["improvement"]
    assert find_moves(index, Selection(), min_change=0.2).moves == ()


def test_what_else_changed_at_the_move_is_said(indexed: Any) -> None:
    old = example_machine()
    new = old.model_copy(update={"driver": "590.1", "libraries": (("numpy", "2.4.0"), ("torch", "2.14.0"))})

    def run(day: int) -> Run:
        rest = {"machine": new, "harness_digest": "5" * 64, "policy_digest": "6" * 64} if day >= 20 else {}
        return {**_slower_after(20)(day), **rest}

    (move,) = find_moves(indexed(40, run), Selection(metrics=("ratio",))).moves
    assert move.also_changed == (
        "harness 111111111111 to 555555555555",
        move.also_changed[1],
        "driver none to 590.1",
        "pydantic 2.14.4 to none",
        "torch 2.13.0 to 2.14.0",
    )
    assert move.also_changed[1].endswith(" to 666666666666")


def test_a_series_that_is_too_short_is_counted_as_such(indexed: Any) -> None:
    found = find_moves(indexed(5, _slower_after(2)), Selection(metrics=("ratio",)))
    assert (found.series, found.too_short, found.moves) == (1, 1, ())


def test_a_check_that_answers_twice_about_one_commit_differently_is_flaky(indexed: Any) -> None:
    def run(day: int) -> Run:
        return {"head": f"{day // 2:040x}", "status": Status.FAIL if day in (1, 3, 6, 7) else Status.PASS}

    found = find_flaky(indexed(10, run), Selection())
    assert found.repeated == 3
    (check,) = found.checks
    assert (check.check, check.stage, check.repeats) == (RATIO, "sweep", 10)
    assert (check.pairs, check.disagreeing, check.share) == (5, 2, 0.4)
    assert (round(check.low, 2), round(check.high, 2)) == (0.12, 0.77)
    assert check.statuses == (("PASS", 6), ("FAIL", 4))


@pytest.mark.parametrize(
    "difference",
    [
        {"head": "e" * 40}, {"harness_digest": "5" * 64}, {"pack_digest": "5" * 64},
        {"policy_digest": "5" * 64}, {"machine": example_machine(gpu=True)},
    ],
)  # fmt: skip
def test_answers_about_different_things_are_no_flake(difference: Run, indexed: Any) -> None:
    def run(day: int) -> Run:
        return (
            {"head": "d" * 40, "status": Status.PASS}
            if day
            else {**difference, "status": Status.FAIL} | ({} if "head" in difference else {"head": "d" * 40})
        )

    assert find_flaky(indexed(2, run), Selection()).checks == ()


def test_flaky_checks_come_with_the_surest_first(tmp_path: Path) -> None:
    checks = {"kernels/rare": (0,), "kernels/often": (0, 1, 2, 3)}
    for day in range(8):
        outcomes = tuple(
            outcome(name, Status.FAIL if day // 2 in pairs and day % 2 else Status.PASS)
            for name, pairs in checks.items()
        )
        write_small(tmp_path / "b" / str(day), day=day, head=f"{day // 2:040x}", outcomes=outcomes)
    with open_index(tmp_path / "i.duckdb") as index:
        index.refresh(tmp_path / "b")
        assert [(c.check, c.disagreeing) for c in find_flaky(index, Selection()).checks] == [
            ("kernels/often", 4), ("kernels/rare", 1),
        ]  # fmt: skip


def test_the_catch_rate_is_the_share_of_controls_that_were_noticed(indexed: Any) -> None:
    index = indexed(28, lambda day: {"noticed": day < 14 or day % 2 == 0})
    found = catch_rates(index, Selection(check="sweep/"), "week")
    assert [(r.stage, r.control, r.runs, r.noticed) for r in found.rates] == [
        ("sweep", "planted", 6, 6),
        ("sweep", "planted", 7, 7),
        ("sweep", "planted", 7, 4),
        ("sweep", "planted", 7, 4),
        ("sweep", "planted", 1, 0),
    ]
    monday = 1_788_134_400_000_000  # 2026-08-31, the Monday before the first bundle
    assert [r.start_us for r in found.rates] == [monday + i * 7 * 86_400_000_000 for i in range(5)]
    assert found.rates[0].share == 1.0
    assert round(found.rates[0].low, 2) == 0.61
    assert len(catch_rates(index, Selection(), "month").rates) == 3


def test_planted_faults_count_at_the_stage_that_is_to_notice_them(tmp_path: Path) -> None:
    def score(day: int, *verdicts: str) -> FaultScore:
        seen = Sighting(column="audit", subject="audit/a", status="FAIL", words="spills")
        cells = (FaultCell(column="audit", checks=1, is_caught=True, seen=seen),)
        results = [
            FaultResult(
                name=f"fault_{i}", title="t", report="r", target="op", expected="kernels", tier=Tier.SMOKE,
                suite="fasttrack", verdict=verdict, reason="x" if verdict in ("skipped", "broken") else "",
                cells=cells if verdict == "caught_elsewhere" else (), duration_s=1,
            )
            for i, verdict in enumerate(verdicts)
        ]  # fmt: skip
        return FaultScore(
            harness_version="0.1.0", harness_digest="1" * 64, pack="k3_decode", pack_digest="2" * 64,
            tier=Tier.SMOKE, seed=0, created=START + timedelta(days=day), cpu_model="Example CPU",
            results=tuple(results),
        )  # fmt: skip

    folder = tmp_path / "scores"
    folder.mkdir()
    (folder / "a.faults.json").write_bytes(score(0, "caught_elsewhere", "skipped").canonical() + b"\n")
    (folder / "copy.faults.json").write_bytes((folder / "a.faults.json").read_bytes())
    (folder / "later.faults.json").write_bytes(score(40, "missed", "missed", "broken").canonical())
    (folder / "bad.faults.json").write_text('{"schema_version": 1}')
    (folder / "other.json").write_text("{}")
    with open_index(tmp_path / "i.duckdb") as index:
        found = index.refresh(folder)
        assert (found.bundles, found.scores, found.refused_count) == (0, 2, 1)
        assert "is no fault score" in found.refused[0].reason
        rates = catch_rates(index, Selection(), "month").rates
        assert [(r.stage, r.control, r.runs, r.noticed) for r in rates] == [
            ("kernels", "fault", 1, 1), ("kernels", "fault", 3, 0),
        ]  # fmt: skip
        (folder / "later.faults.json").unlink()
        assert index.refresh(folder).scores == 1
        (folder / "a.faults.json").unlink()
        assert index.refresh(folder).scores == 1
