"""The pipeline: crashes are observations, faults of ours are not outcomes, and an interrupted run goes on."""

import sys
from pathlib import Path

import pytest

from harness import pipeline
from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.errors import InputError
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.evidence.bundle import write_bundle
from harness.evidence.run_folder import open_run
from harness.executors import local
from harness.executors.local import HarnessFault
from harness.pipeline import Progress, execute, failed_checks, rejudge
from harness.planner import CodeDigests, make_plan
from tests.fakes.requests import plan_request

NONCE = "0123456789abcdef"


def _plan(stages: tuple[StageName, ...] = (StageName.COVERAGE,), only: tuple[str, ...] = ()) -> Plan:
    return make_plan(plan_request(), CodeDigests("a" * 64, "b" * 64), NONCE, stages, only)


def _execute(
    plan: Plan,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str = "honest",
    keep_going: bool = False,
) -> dict[str, Status]:
    monkeypatch.setattr(
        pipeline,
        "serve_command",
        lambda job: (sys.executable, "-m", "tests.fakes.serve", str(job), behaviour),
    )
    with open_run(folder / "run", plan) as run:
        execute(plan, run, None, folder / "cache", Progress(say=lambda *_: None), keep_going)
        return {outcome.check: outcome.status for outcome in run.outcomes()}


def test_a_plan_of_honest_checks_passes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(only=("mix", "prefill"))
    assert _execute(plan, tmp_path, monkeypatch) == {
        "coverage/decline/prefill": Status.PASS,
        "coverage/poison/mix": Status.PASS,
    }


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("segfault", "SIGSEGV"), ("exit", "exit code 3"), ("raise", "illegal memory access")],
)
def test_a_candidate_that_dies_fails_with_its_signal_and_the_next_check_still_runs(
    behaviour: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(only=("mix", "head"))
    statuses = _execute(plan, tmp_path, monkeypatch, behaviour)
    assert statuses == {"coverage/poison/mix": Status.FAIL, "coverage/poison/head": Status.FAIL}
    with open_run(tmp_path / "run", plan) as run:
        assert words in run.outcomes()[0].summary


def test_a_candidate_that_hangs_is_ended_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 6.0)
    monkeypatch.setattr(local, "PATIENCE", 0.0)
    plan = _plan(only=("mix",))
    assert _execute(plan, tmp_path, monkeypatch, "hang") == {"coverage/poison/mix": Status.FAIL}
    with open_run(tmp_path / "run", plan) as run:
        assert "timed out" in run.outcomes()[0].summary


def test_a_fault_of_the_harness_gives_no_outcome_and_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(only=("mix",))
    with pytest.raises(HarnessFault, match="ZeroDivisionError"):
        _execute(plan, tmp_path, monkeypatch, "harness_fault")
    with open_run(tmp_path / "run", plan) as run:
        assert run.outcomes() == ()


def test_a_server_that_lies_to_the_sampler_is_told_in_words_and_is_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(only=("mix",))
    with pytest.raises(HarnessFault) as caught:
        _execute(plan, tmp_path, monkeypatch, "obstacle")
    assert str(caught.value) == (
        "coverage/poison/mix could not be sampled, which says nothing of the candidate; finished checks are "
        "kept and --resume goes on: http://127.0.0.1:1/tokenize answers without tokens: {}"
    )
    with open_run(tmp_path / "run", plan) as run:
        assert run.outcomes() == ()


def test_a_process_that_cannot_start_is_a_fault_of_ours_and_no_candidate_s_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(only=("mix",))
    with pytest.raises(HarnessFault, match=r"exit code 1 before it was ready[^~]*no module named") as caught:
        _execute(plan, tmp_path, monkeypatch, "no_start")
    assert caught.value.exit_code == 2
    with open_run(tmp_path / "run", plan) as run:
        assert run.outcomes() == ()


def test_what_a_dying_candidate_printed_travels_in_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(only=("mix",))
    _execute(plan, tmp_path, monkeypatch, "says_and_exits")
    with open_run(tmp_path / "run", plan) as run:
        assert "logs/child.log of the bundle" in run.outcomes()[0].next_step
        folder = write_bundle(run)
    assert "last words of the candidate" in (folder / "logs" / "child.log").read_text()


def test_a_resumed_run_repeats_no_finished_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(only=("mix", "head"))
    first = _plan(only=("mix", "head"))
    _execute(first, tmp_path, monkeypatch)
    # A second pass over the same run with a pack that would crash finds nothing left to run.
    assert set(_execute(plan, tmp_path, monkeypatch, "segfault").values()) == {Status.PASS}


def test_a_run_folder_never_takes_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _execute(_plan(only=("mix",)), tmp_path, monkeypatch)
    with pytest.raises(InputError):
        open_run(tmp_path / "run", _plan(only=("head",)))


def test_later_stages_are_skipped_after_a_failure_unless_told_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan((StageName.COVERAGE, StageName.EVALS), ("mix", "drift"))
    statuses = _execute(plan, tmp_path / "a", monkeypatch, "raise")
    assert statuses["evals/drift/tiny"] is Status.SKIPPED
    statuses = _execute(plan, tmp_path / "b", monkeypatch, "raise", keep_going=True)
    assert statuses["evals/drift/tiny"] is Status.FAIL


def test_judging_stored_samples_again_gives_the_same_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(only=("mix",))
    _execute(plan, tmp_path, monkeypatch)
    with open_run(tmp_path / "run", plan) as run:
        stored = run.outcomes()[0]
        again = rejudge(plan)(plan.checks[0], run.samples(plan.checks[0].id))
    assert again == stored


def test_failed_checks_counts_what_has_no_outcome_but_not_what_the_tier_cannot_run() -> None:
    plan = _plan(only=("mix", "head"))
    assert [check.id for check in failed_checks(plan, {})] == ["coverage/poison/mix", "coverage/poison/head"]
    gone = tuple(check.model_copy(update={"unavailable": "needs a GPU"}) for check in plan.checks)
    assert failed_checks(plan.model_copy(update={"checks": gone}), {}) == ()


def test_the_longest_check_of_a_stage_begins_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(only=("mix", "head"))
    costs = {"coverage/poison/mix": 1.0, "coverage/poison/head": 5.0}
    checks = tuple(check.model_copy(update={"cost_s": costs[check.id]}) for check in plan.checks)
    begun: list[str] = []
    monkeypatch.setattr(
        pipeline, "serve_command", lambda job: (sys.executable, "-m", "tests.fakes.serve", str(job), "honest")
    )
    with open_run(tmp_path / "run", plan.model_copy(update={"checks": checks})) as run:
        progress = Progress(say=lambda what, *_: begun.append(what))
        execute(run.plan, run, None, tmp_path / "cache", progress)
    assert [what for what in begun if what in costs] == ["coverage/poison/head", "coverage/poison/mix"]


def test_the_audit_compiles_in_its_first_check_before_others_begin() -> None:
    audits = _checks("audit/a/sm_90a", "audit/b/sm_90a", "audit/c/sm_90a", unavailable=("audit/a/sm_90a",))
    first, rest = pipeline._to_begin_with(audits)
    assert [check.id for check in first] == ["audit/b/sm_90a"]
    assert [check.id for check in rest] == ["audit/a/sm_90a", "audit/c/sm_90a"]


def test_other_stages_begin_side_by_side() -> None:
    assert pipeline._to_begin_with(_checks("sweep/a", "sweep/b"))[0] == []


def _checks(*ids: str, unavailable: tuple[str, ...] = ()) -> list[Check]:
    return [
        Check(
            id=check_id, stage=StageName(check_id.split("/")[0]), proves="it holds", cost_s=1.0,
            unavailable="no compiler" if check_id in unavailable else None,
        )
        for check_id in ids
    ]  # fmt: skip


def test_time_left_trusts_the_plan_until_much_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("harness.pipeline.time.monotonic", lambda: now[0])
    said: list[float | None] = []
    progress = Progress(say=lambda what, done, total, left: said.append(left), _begun=0.0)
    sweeps = [check.model_copy(update={"cost_s": 60.0}) for check in _checks("sweep/a", "sweep/b")]
    gone = [
        check.model_copy(update={"cost_s": 900.0}) for check in _checks("evals/c", unavailable=("evals/c",))
    ]
    shared = [check.model_copy(update={"cost_s": 80.0}) for check in _checks("evals/d")]
    progress.begin([*sweeps, *gone, *shared])
    progress.note("begun")  # 60 + 60 + 80 in company: 160 s
    now[0] = (
        180.0  # the first took three times its estimate: (180 + 60) / (60 + 60) for the 100 s that are left
    )
    progress.finish(sweeps[0], _outcome(sweeps[0]))
    assert said == [160.0, 200.0]


def _outcome(check: Check) -> Outcome:
    return Outcome(
        check=check.id, status=Status.FAIL, tier=Tier.SMOKE, summary="it does not hold", next_step="look"
    )
