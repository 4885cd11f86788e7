"""The loop over MCP: an agent that improves a slow op is accepted; cheats, crashes, floods and vandals end
with a record, and nothing is harmed.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.agent import loop
from harness.agent.judge import Judge, Settings
from harness.agent.loop import Budgets, optimize
from harness.domain.journal import LoopResult
from harness.engines.packs import load_pack
from harness.evidence.journal import JOURNAL, load_journal
from harness.executors.confinement import confinement_here
from tests.agent.loops import (
    FILE,
    OP,
    ROOT,
    SOUND,
    fitted_to_public_cells,
    policy_file,
    slow_repository,
)

AGENTS = ROOT / "tests/agent/agents"
Run = Callable[..., LoopResult]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The repository of the slow op, and the policy."""
    folder = tmp_path_factory.mktemp("places")
    return slow_repository(folder / "repo"), policy_file(folder / "policies")


@pytest.fixture
def judge(places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    # The tree of a developer may change while a test runs; the test of tampering plants its own change.
    monkeypatch.setattr(loop, "harness_digest", lambda: "0" * 64)
    monkeypatch.setattr(loop, "pack_digest", lambda _pack: "0" * 64)
    repo, policy = places
    settings = Settings(
        pack=load_pack("k3_decode"), repo=repo, policy=str(policy), folder=tmp_path / "judge",
        workspace=tmp_path / "workspace", attempts=4, cell="b8.", held_out=6,
    )  # fmt: skip
    return Judge.of(settings, OP)


@pytest.fixture
def run(judge: Judge, tmp_path: Path) -> Run:
    def started(*command: str, **budgets: float) -> LoopResult:
        line = " ".join(command)
        given = Budgets(**{"time_s": 800.0, **budgets})  # type: ignore[arg-type]  # whole and real numbers
        return optimize(judge, line, given, tmp_path / "out", {}, lambda _text: None)

    return started


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_scripted_agent_makes_a_slow_op_half_again_as_fast_with_a_passing_verdict(
    run: Run, judge: Judge, tmp_path: Path
) -> None:
    result = run(sys.executable, str(AGENTS / "improver.py"), target=1.5)
    attempt = judge.entries()[1].result
    found = (result.ended, result.attempts, result.accepted, result.best)
    assert found == ("verdict", 1, 1, 1), (result.words, attempt)
    assert attempt is not None
    assert attempt.speed is not None
    assert attempt.held_out is not None
    assert attempt.speed.low > 1.5
    assert (attempt.held_out.is_passed, attempt.held_out.kind) == (True, "")
    assert attempt.verdict.startswith("admitted: all 5 proofs")
    assert (tmp_path / "out/best" / FILE).read_text() == SOUND
    assert judge.verdict is not None
    assert judge.verdict.bundle is not None
    travelled = load_journal(judge.verdict.bundle / "logs" / JOURNAL)
    assert [e.kind for e in travelled] == ["begun"]  # it was bundled while attempt 1 was judged
    assert [e.kind for e in judge.entries()] == ["begun", "attempt", "ended"]
    assert result.journal_digest == judge.entries()[-1].digest()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_right_in_public_cells_alone_falls_in_those_that_nobody_sees(
    run: Run, judge: Judge, tmp_path: Path
) -> None:
    (tmp_path / "candidates").mkdir()
    (tmp_path / "candidates/fitted.py").write_text(fitted_to_public_cells())
    judge.settings = dataclasses.replace(judge.settings, attempts=1)
    result = run(sys.executable, str(AGENTS / "cheat.py"), str(tmp_path / "candidates"))
    assert (result.ended, result.attempts, result.accepted, result.best) == ("attempts", 1, 0, None)
    (found,) = [e.result for e in judge.entries() if e.result is not None]
    assert found.stage == "held_out"
    assert found.held_out is not None
    assert (found.held_out.kind, found.words) == (
        "error_above_bound", "a held-out test does not pass: error_above_bound",
    )  # fmt: skip
    assert "for row in range" in (tmp_path / "out/best" / FILE).read_text()


def test_an_agent_that_never_ends_is_ended_by_its_time(run: Run) -> None:
    result = run("sleep", "1000", time_s=1.0)
    assert (result.ended, result.words, result.attempts) == ("time", "1 s are spent", 0)


def test_an_agent_that_submits_the_same_for_ever_ends_with_its_attempts(run: Run, judge: Judge) -> None:
    result = run(sys.executable, str(AGENTS / "looper.py"), time_s=200.0)
    assert (result.ended, result.attempts, result.accepted, result.best) == ("attempts", 4, 0, None)
    entries = judge.entries()
    assert [e.kind for e in entries] == ["begun", *["attempt"] * 4, "ended"]
    words = {e.result.words for e in entries if e.result is not None}
    assert words == {"nothing differs from the best version so far"}


def test_an_agent_that_crashes_is_recorded_with_its_last_words(run: Run) -> None:
    result = run(sys.executable, "-c", "'raise RuntimeError(\"no_model\")'")
    assert result.ended == "agent_failed"
    assert result.words.startswith("the agent ended with exit code 1;")
    assert "no_model" in result.words


def test_an_agent_that_floods_its_output_is_ended_and_its_log_is_bounded(run: Run, tmp_path: Path) -> None:
    result = run("yes")
    assert (result.ended, result.words) == ("agent_failed", "it wrote more than 32 MiB of output")
    assert (tmp_path / "out/agent.log").stat().st_size == 2**20


@pytest.mark.skipif(confinement_here() == "none", reason="needs bubblewrap or mount namespaces")
def test_an_agent_cannot_edit_the_harness_the_judge_or_end_its_processes(run: Run, judge: Judge) -> None:
    target = ROOT / "harness/stages/kernels/judging.py"
    before, journal = target.read_bytes(), judge.journal.read_bytes()
    script = f"echo x >> {target}; echo x >> {judge.journal}; kill -9 -1; echo x > allowed && exit 7"
    result = run("sh", "-c", f"'{script}'")
    assert result.ended == "agent_failed"
    assert "Read-only file system" in result.words
    assert target.read_bytes() == before
    assert judge.journal.read_bytes().startswith(journal)
    assert [e.kind for e in judge.entries()] == ["begun", "ended"]


def test_a_harness_that_changed_meanwhile_voids_everything_that_was_proved(
    run: Run, judge: Judge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digests = iter(["0" * 64, "1" * 64])
    monkeypatch.setattr(loop, "harness_digest", lambda: next(digests))
    judge.best, judge.best_files, judge.accepted = 1, {FILE: "a forged best"}, 1
    result = run("true")
    assert (result.ended, result.best, result.over_start) == ("tampered", None, 1.0)
    assert (tmp_path / "out/best" / FILE).read_text() == judge.start[FILE]
    assert [e.kind for e in judge.entries()] == ["begun", "fault", "ended"]


def test_an_agent_finds_server_and_files_in_the_form_that_agents_read(run: Run, judge: Judge) -> None:
    result = run("sh", "-c", "'test -n \"$FASTTRACK_MCP_TOKEN\" && test -f mcp.json'")
    assert result.ended == "agent_ended"
    served = json.loads((judge.settings.workspace / "mcp.json").read_text())["mcpServers"]["fasttrack"]
    assert served["url"].startswith("http://127.0.0.1:")


def test_attempts_without_one_accepted_end_the_loop_on_a_plateau(run: Run, judge: Judge) -> None:
    judge.attempts, judge.since_accepted = 3, 3
    result = run("sleep", "1000", plateau=3)
    assert (result.ended, result.words) == ("plateau", "none of the last 3 attempts was accepted")
