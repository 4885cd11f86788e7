"""`fasttrack publish` from the outside: options, environment, what is printed, exit codes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli import gate as gate_command
from harness.cli.main import _exit_code
from harness.report.markdown import MARKER
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_policy_set, write_example
from tests.forge.github_server import FakeGitHub, Fault, serve_github
from tests.forge.material import TOKEN, github

PR = "octo/vllm#61867"


@pytest.fixture(autouse=True)
def _example_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's judge and planner stand in for the stages'."""
    import harness.documents

    monkeypatch.setattr(gate_command, "judge_of", lambda folder: judge)
    monkeypatch.setattr(gate_command, "replan_of", lambda: as_planned)
    monkeypatch.setattr(harness.documents, "load_policy_set", example_policy_set)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_example(tmp_path_factory.mktemp("cli") / "bundle"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGitHub]:
    with serve_github(github()) as served:
        monkeypatch.setenv("GITHUB_API_URL", served.url)
        monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
        monkeypatch.delenv("GH_TOKEN", raising=False)
        yield served
        assert served.violations == []


def test_the_report_s_comment_and_the_gate_s_verdict_are_published(
    bundle: str, server: FakeGitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["publish", bundle, "--pr", PR, "--ai-use", "wrote the kernel"]) == 0
    body = server.comments[0]["body"]
    assert body.startswith(f"{MARKER}\n\n## fasttrack: rejected")
    assert "- AI use: `wrote the kernel`" in body
    run = server.check_runs[7]
    assert (run["conclusion"], run["status"]) == ("failure", "completed")
    assert [(a["path"], a["start_line"]) for a in run["annotations"]] == [("vllm/v1/core/sched.py", 118)]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "written: https://github.example/o/r/pull/1#100",
        "written: https://github.example/o/r/runs/7",
    ]
    assert printed.err == ""


def test_a_dry_run_prints_each_request_with_its_address_and_body(
    bundle: str, server: FakeGitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["publish", bundle, "--pr", PR, "--dry-run"]) == 0
    assert server.writes == []
    text = capsys.readouterr().out
    assert TOKEN not in text
    heads = [line for line in text.splitlines() if line.startswith(("POST ", "PATCH "))]
    assert heads == [
        f"POST {server.url}/repos/octo/vllm/issues/61867/comments",
        f"POST {server.url}/repos/octo/vllm/check-runs",
    ]
    assert text.endswith("2 requests would be sent to octo/vllm#61867; none was\n")
    assert "X-GitHub-Api-Version: 2022-11-28\nAuthorization: token (from the environment)\n{" in text
    first = json.loads(text[text.index("{") : text.index("POST", 5)])
    assert first["body"].startswith(MARKER)


def test_an_offline_dry_run_reads_and_sends_nothing_and_says_what_it_cannot_know(
    bundle: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_API_URL", "http://127.0.0.1:1")  # nobody listens there
    assert _exit_code(["publish", bundle, "--pr", PR, "--dry-run", "--offline"]) == 0
    printed = capsys.readouterr().out
    assert "POST http://127.0.0.1:1/repos/octo/vllm/issues/61867/comments" in printed
    assert '"head_sha": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"' in printed
    assert "offline: nothing was read from GitHub, so head and base are the bundle's own" in printed
    assert _exit_code(["publish", bundle, "--pr", PR, "--offline"]) == 2
    assert "goes with --dry-run alone" in capsys.readouterr().err


def test_the_json_document_is_the_publication(
    bundle: str, server: FakeGitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["publish", bundle, "--pr", PR, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pull_request"]["number"] == 61867
    assert [r["method"] for r in document["requests"]] == ["POST", "POST"]


def test_several_bundles_of_one_head_are_gated_together_and_the_first_is_shown(
    bundle: str, server: FakeGitHub, tmp_path: Path
) -> None:
    passing = write_example(tmp_path / "passing", scene="passing")
    assert _exit_code(["publish", bundle, str(passing), "--pr", PR, "--no-comment"]) == 0
    assert server.check_runs[7]["conclusion"] == "failure"
    assert (
        "`isolation/zones/change passes in one bundle and fails in another`"
        in (server.check_runs[7]["summary"])
    )


def test_one_of_the_two_can_be_left_out(bundle: str, server: FakeGitHub) -> None:
    assert _exit_code(["publish", bundle, "--pr", PR, "--no-comment"]) == 0
    assert (len(server.comments), len(server.check_runs)) == (0, 1)
    assert _exit_code(["publish", bundle, "--pr", PR, "--no-check-run"]) == 0
    assert len(server.comments) == 1


def test_without_a_token_publishing_is_refused_and_a_dry_run_is_not(
    bundle: str,
    server: FakeGitHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GITHUB_TOKEN")
    assert _exit_code(["publish", bundle, "--pr", PR]) == 2
    assert "publishing needs a token" in capsys.readouterr().err
    assert _exit_code(["publish", bundle, "--pr", PR, "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pr", "61867"], "write it as OWNER/REPO#N"),
        (["--pr", "octo/vllm#5"], "it was made for pull request 61867"),
    ],
)
def test_another_pull_request_is_exit_code_2_in_one_paragraph(
    arguments: list[str],
    words: str,
    bundle: str,
    server: FakeGitHub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _exit_code(["publish", bundle, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert server.writes == []


def test_a_broken_bundle_is_not_published(
    bundle: str, server: FakeGitHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    (broken / "logs" / "compile.log").write_text("edited")
    assert _exit_code(["publish", str(broken), "--pr", PR]) == 2
    assert "does not verify, so nothing of it is published" in capsys.readouterr().err
    assert server.seen == []


def test_a_refusal_is_exit_code_2_and_shows_no_token(
    bundle: str, server: FakeGitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = [Fault(401, message="Bad credentials")]
    assert _exit_code(["publish", bundle, "--pr", PR]) == 2
    printed = capsys.readouterr()
    assert "the token in GITHUB_TOKEN or GH_TOKEN is not valid" in printed.err
    assert TOKEN not in printed.out + printed.err
