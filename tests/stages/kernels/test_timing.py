"""Timings that a candidate cannot state: two clocks, outputs of timed calls, and a worker that lies."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Status
from harness.measure.described_run import DescribedRun, TimedError
from harness.measure.outside import Window, agreement
from harness.stages.kernels.timing import Bounds, TimedOp, judge_described, time_trusted
from tests.stages.kernels.example_pack import NormPack

BOUNDS = Bounds(factor=2, floor_ulp=2, hard_cap=0.05)


def windows(full_us: float, empty_us: tuple[float, float] = (100.0, 120.0)) -> list[Window]:
    return [
        Window(arm="none", claimed_us=0.0, outside_us=empty_us[0]),
        Window(arm="optimised", claimed_us=0.0, outside_us=full_us),
        Window(arm="none", claimed_us=0.0, outside_us=empty_us[1]),
    ]


def test_two_clocks_that_agree_pass_after_what_an_empty_window_takes() -> None:
    status, outside, words = agreement(10.0, windows(1110.0), calls=100)
    assert (status, outside) == (Status.PASS, 10.0)
    assert words == "10.00 us a call by the worker, 10.00 us by the clock outside, +- 0.20 us"


@pytest.mark.parametrize("claimed_us", [0.1, 5.0, 20.0])
def test_a_worker_that_claims_another_time_is_invalid(claimed_us: float) -> None:
    assert agreement(claimed_us, windows(1110.0), calls=100)[0] is Status.INVALID


def test_calls_too_short_for_the_clock_outside_are_inconclusive() -> None:
    assert agreement(0.5, windows(160.0, (50.0, 250.0)), calls=100)[0] is Status.INCONCLUSIVE


def described(**changes: Any) -> DescribedRun:
    error = TimedError(
        inputs="inputs0", output="out", token=0, stock_l2=1e-3, optimised_l2=1e-3, stock_worst=1e-3,
        optimised_worst=1e-3, ulp=0.0, least=0.0,
    )  # fmt: skip
    values = {
        "us": (5.0, 5.1, 5.2), "outside_us": 6.0, "copies": 4, "kernels": 1, "errors": (error,),
        "mismatches": (), "unwritten": (("out", 0),), "touched": (),
    }  # fmt: skip
    return DescribedRun.model_validate(values | changes)


def test_a_described_launch_passes_with_its_time_and_its_error() -> None:
    status, words, share = judge_described(described(), BOUNDS)
    assert (status, share) == (Status.PASS, 0.5)
    assert words == "5.10 us a call of 1 kernel, as launched by the harness, worst error 0.50 of its bound"


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"mismatches": (("ids", 3),)}, Status.FAIL, "3 elements of ids differ"),
        ({"unwritten": (("out", 7),)}, Status.FAIL, "left out unwritten: work that was timed was not done"),
        ({"touched": ("weight",)}, Status.FAIL, "timed calls wrote weight"),
        ({"outside_us": 1.0}, Status.INVALID, "5.10 us by events, 1.00 us by the process's clock"),
    ],
)
def test_what_timed_launches_left_decides(changes: dict[str, Any], status: Status, words: str) -> None:
    found, said, _ = judge_described(described(**changes), BOUNDS)
    assert found is status
    assert words in said


class Honest(NormPack):
    """The example's op, under a name that a child finds."""

    name = "honest_norms"


class Liar(NormPack):
    """Turns the worker's clock down when it is first called."""

    name = "lying_norms"

    def run_optimised(self, op: str, implementation: str, args: Any, launches: Any) -> None:
        import time

        if not hasattr(time, "sound"):
            sound = time.perf_counter_ns
            time.sound = sound  # type: ignore[attr-defined]  # the lie leaves a trace
            time.perf_counter_ns = lambda: sound() // 100
        for _ in range(40):  # long enough for any clock
            super().run_optimised(op, implementation, args, launches)


@pytest.fixture
def found_by_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packs as an installed distribution would offer them."""
    info = tmp_path / "site" / "norms-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: norms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fasttrack.packs]\n"
        "honest_norms = tests.stages.kernels.test_timing:Honest\n"
        "lying_norms = tests.stages.kernels.test_timing:Liar\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(Path.cwd()), *sys.path]))


def timed(pack: NormPack, folder: Path) -> TimedOp:
    (contract,) = pack.ops()
    cell = Cell(arch="cpu", batch=4, context=65)
    return time_trusted(pack, "tests", contract, cell, "tiny", "cpu", 3, BOUNDS, folder)  # type: ignore[arg-type]  # the parts of a pack that an op needs


@pytest.mark.usefixtures("found_by_children")
def test_a_worker_whose_clock_was_turned_down_is_invalid_and_an_honest_one_is_not(tmp_path: Path) -> None:
    lie = timed(Liar(), tmp_path / "lie")
    assert lie.status is Status.INVALID, lie.words
    assert lie.kind == "worker"
    assert lie.claimed_us is not None
    assert lie.optimised_us is not None
    assert lie.claimed_us < 0.05 * lie.optimised_us
    truth = timed(Honest(), tmp_path / "truth")
    assert truth.status in (Status.PASS, Status.INCONCLUSIVE), truth.words
    assert truth.reason == "a call on a CPU launches nothing that could be described"
    assert truth.worst_share is not None
    assert truth.worst_share <= 1
