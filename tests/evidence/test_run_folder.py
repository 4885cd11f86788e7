"""A run while it goes: crashes, resumes, and what it refuses."""

import os
import shutil
from pathlib import Path

import pytest

from harness.domain.bundle import BundleState, Environment
from harness.domain.check import Check
from harness.domain.errors import InputError
from harness.domain.plan import Plan
from harness.evidence.bundle import write_bundle
from harness.evidence.names import OUTCOMES, samples_folder
from harness.evidence.run_folder import RunFolder, load_plan, open_run
from harness.evidence.verify import verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import example_plan, example_samples, only


@pytest.fixture
def plan() -> Plan:
    return only(example_plan(scene="passing"), lambda c: c.id.startswith("audit/"))


def _record(run: RunFolder, check: Check) -> None:
    samples = example_samples(check, run.plan.tier, "passing")
    run.record(judge(check, samples), samples)


def _finish(folder: Path, plan: Plan) -> int:
    """Go on with a run to its end; gives how many checks still had to run."""
    with open_run(folder, plan) as run:
        rest = [c for c in plan.checks if c.id not in run.finished()]
        for check in rest:
            _record(run, check)
        write_bundle(run, Environment())
    return len(rest)


@pytest.fixture
def half(tmp_path: Path, plan: Plan) -> Path:
    with open_run(tmp_path / "run", plan) as run:
        for check in plan.checks[:3]:
            _record(run, check)
    return tmp_path / "run"


def test_a_resumed_run_repeats_no_finished_check(half: Path, plan: Plan) -> None:
    assert _finish(half, plan) == len(plan.checks) - 3
    assert verify(half, judge).state is BundleState.VERIFIED


def test_a_run_cut_at_any_byte_of_its_outcomes_is_incomplete_and_goes_on(half: Path, plan: Plan) -> None:
    outcomes = (half / OUTCOMES).read_bytes()
    for cut in range(0, len(outcomes), 37):
        folder = half.with_name("cut")
        shutil.copytree(half, folder)
        with (folder / OUTCOMES).open("r+b") as file:
            file.truncate(cut)
        assert verify(folder, judge).state is BundleState.INCOMPLETE, cut
        whole = outcomes[:cut].count(b"\n")
        with open_run(folder, plan) as run:
            assert run.finished() == {c.id for c in plan.checks[:whole]}
        shutil.rmtree(folder)


def test_a_run_cut_at_any_byte_goes_on_to_a_bundle_that_verifies(half: Path, plan: Plan) -> None:
    outcomes = (half / OUTCOMES).read_bytes()
    for cut in (0, 1, len(outcomes) // 2, len(outcomes) - 1):
        folder = half.with_name("cut")
        shutil.copytree(half, folder)
        with (folder / OUTCOMES).open("r+b") as file:
            file.truncate(cut)
        _finish(folder, plan)
        assert verify(folder, judge).state is BundleState.VERIFIED, cut
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "leftover", ["plan.json", "samples/.writing-audit~x", ".scratch/job.json", "manifest.json"]
)
def test_what_a_crash_leaves_half_written_does_not_break_the_run(
    half: Path, plan: Plan, leftover: str
) -> None:
    path = half / leftover
    path = path.with_name(".writing-" + path.name) if "/" not in leftover else path
    path.parent.mkdir(exist_ok=True)
    if leftover.startswith("samples"):
        path.mkdir()
        (path / "table.parquet").write_bytes(b"PAR1 half")
    else:
        path.write_bytes(b'{"half')
    assert verify(half, judge).state is BundleState.INCOMPLETE
    _finish(half, plan)
    assert verify(half, judge).state is BundleState.VERIFIED


def test_samples_without_an_outcome_are_written_again(half: Path, plan: Plan) -> None:
    lines = (half / OUTCOMES).read_bytes().splitlines(keepends=True)
    (half / OUTCOMES).write_bytes(b"".join(lines[:2]))  # killed between samples and outcome
    assert verify(half, judge).state is BundleState.INCOMPLETE
    assert _finish(half, plan) == len(plan.checks) - 2
    assert verify(half, judge).state is BundleState.VERIFIED


def test_an_outcome_whose_samples_a_power_cut_lost_runs_again(half: Path, plan: Plan) -> None:
    lost = plan.checks[1].id
    next((half / samples_folder(lost)).glob("*.parquet")).write_bytes(b"")
    with open_run(half, plan) as run:
        assert lost not in run.finished()
        assert len(run.finished()) == 2


def test_a_finished_bundle_opened_again_is_a_run_until_it_is_finished_again(
    tmp_path: Path, plan: Plan
) -> None:
    _finish(tmp_path / "run", plan)
    with open_run(tmp_path / "run", plan):
        assert verify(tmp_path / "run", judge).state is BundleState.INCOMPLETE
    assert _finish(tmp_path / "run", plan) == 0
    assert verify(tmp_path / "run", judge).state is BundleState.VERIFIED


def test_a_folder_of_another_plan_is_refused(half: Path) -> None:
    with pytest.raises(InputError, match="holds a run of plan"):
        open_run(half, example_plan(scene="passing"))


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is no run"):
        open_run(tmp_path, plan)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_processes_cannot_write_one_run(tmp_path: Path, plan: Plan) -> None:
    with open_run(tmp_path / "run", plan), pytest.raises(InputError, match="another fasttrack process"):
        open_run(tmp_path / "run", plan)
    open_run(tmp_path / "run", plan).close()


def test_an_outcome_is_written_once_for_a_planned_check_with_its_own_samples(half: Path, plan: Plan) -> None:
    stranger = example_plan(scene="passing").checks[0]
    other = example_samples(plan.checks[4], plan.tier, "passing")
    with open_run(half, plan) as run:
        with pytest.raises(InputError, match="already recorded"):
            _record(run, plan.checks[0])
        with pytest.raises(InputError, match="no such check"):
            _record(run, stranger)
        with pytest.raises(InputError, match="without samples"):
            run.record(judge(plan.checks[4], other), None)
        with pytest.raises(InputError, match="comes with the samples"):
            run.record(judge(plan.checks[4], other), example_samples(plan.checks[5], plan.tier, "passing"))


def test_the_plan_of_a_run_can_be_read_back(half: Path, plan: Plan) -> None:
    assert load_plan(half) == plan
    with pytest.raises(InputError, match=r"no plan\.json"):
        load_plan(half / "samples")


def test_the_lock_ends_with_the_run(tmp_path: Path, plan: Plan) -> None:
    run = open_run(tmp_path / "run", plan)
    before = len(os.listdir("/proc/self/fd"))
    run.close()
    run.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_folder_that_cannot_be_made_is_told_in_words(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot be made .*choose another place with --out"):
        open_run(tmp_path / "file" / "run", plan)
