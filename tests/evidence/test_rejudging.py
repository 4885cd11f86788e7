"""Outcomes that are judged again by several processes are judged as one process judges them."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from harness import forking
from harness.domain.bundle import BundleState
from harness.domain.check import Check, Outcome, Samples, Status
from harness.evidence.verify import examine
from tests.evidence.example_judge import judge
from tests.evidence.example_run import example_plan, write_example
from tests.evidence.tampering import edit_outcomes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes share the work by forking")


ROUTER = "kernels/router/cpu.tp1.dcp1.b64.c512.d0.bf16.decode"


@pytest.fixture(scope="module")
def admitted_by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a FAIL made a PASS."""
    folder = write_example(tmp_path_factory.mktemp("mixed") / "bundle", example_plan())

    def admit(outcome: Outcome) -> Outcome:
        is_router = outcome.check == ROUTER
        return outcome.model_copy(update={"status": Status.PASS, "next_step": ""}) if is_router else outcome

    edit_outcomes(folder, admit)
    return folder


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, for however few outcomes."""
    monkeypatch.setattr(forking, "processes_for", lambda places, at_least: 2)


@pytest.mark.usefixtures("forks")
def test_two_processes_find_what_one_finds_in_the_same_order(
    admitted_by_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, work = examine(admitted_by_hand, judge)
    monkeypatch.setattr(forking, "processes_for", lambda places, at_least: 1)
    alone, own_work = examine(admitted_by_hand, judge)
    assert alone.state is BundleState.BROKEN
    assert "the samples give FAIL" in alone.model_dump_json()
    assert shared == alone
    assert work.judged == own_work.judged


@pytest.mark.usefixtures("forks")
def test_outcomes_are_judged_in_other_processes(admitted_by_hand: Path) -> None:
    def judged_by(check: Check, samples: Samples) -> Outcome | None:
        outcome = judge(check, samples)
        return outcome and outcome.model_copy(update={"summary": f"judged by {os.getpid()}"})

    _, work = examine(admitted_by_hand, judged_by)
    assert len({o.summary for o in work.judged.values()}) > 1


@pytest.mark.usefixtures("forks")
def test_a_judge_whose_process_is_killed_judges_here(admitted_by_hand: Path) -> None:
    def killed(check: Check, samples: Samples) -> Outcome | None:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return judge(check, samples)

    assert examine(admitted_by_hand, killed)[0] == examine(admitted_by_hand, judge)[0]
