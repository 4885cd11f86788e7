"""`fasttrack plan` and the options that commands share."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from harness.cli import evals, plan, run, sweep, validate
from harness.cli.console import out, shortened
from harness.cli.finish import _skipped_rows
from harness.cli.main import _exit_code
from harness.cli.selectors import SELECTORS, Selection, selecting
from harness.domain.check import Outcome, Status
from harness.domain.machine import Tier

NONCE = "0123456789abcdef"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits; the second one adds a page."""
    root = tmp_path_factory.mktemp("repository")
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for name in ("README.md", "docs.md"):
        (root / name).write_text("text\n")
        subprocess.run([*git, "add", name], check=True)
        subprocess.run([*git, "commit", "-q", "-m", name], check=True)
    return root


@pytest.mark.parametrize(
    ("app", "left_out", "own"),
    [
        (
            validate.app,
            {"machine"},
            {"out", "resume", "keep_going", "json", "journal", "executor", "address"},
        ),
        (plan.app, set(), {"save", "show_all", "json"}),
        (run.app, {"stage", "machine"}, {"out", "resume", "stage", "json", "executor", "address"}),
        (
            evals.app,
            {"stage", "machine"},
            {"out", "resume", "task", "data", "name", "json", "engine", "server"},
        ),
        (
            sweep.app,
            {"stage", "machine"},
            {
                "out",
                "resume",
                "name",
                "json",
                "executor",
                "address",
                "engine",
                "server",
                "tokens",
                "batch",
                "prompt",
                "bench",
            },
        ),
    ],
    ids=["validate", "plan", "run", "evals run", "sweep run"],
)
def test_commands_that_plan_have_the_same_selectors_and_their_own_options(
    app: typer.Typer, left_out: set[str], own: set[str]
) -> None:
    command: Any = typer.main.get_command(app)
    command = getattr(command, "commands", {}).get("run", command)
    options = {parameter.name for parameter in command.params} - {"install_completion", "show_completion"}
    assert options == (SELECTORS.keys() - left_out) | own


def test_a_command_gets_what_was_selected_and_defaults_for_what_it_leaves_out() -> None:
    seen: list[tuple[Selection, bool]] = []

    def record(selection: Selection, loud: bool = False) -> None:
        seen.append((selection, loud))

    command: Callable[..., None] = selecting(without=("machine", "stage"), policy="smoke")(record)
    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(["--base", "v1", "--loud", "--full"], standalone_mode=False)
    assert seen == [
        (
            Selection("k3_decode", "smoke", Path(), "v1", "HEAD", "auto", (), None, False, True, None, None),
            True,
        )
    ]


def test_a_plan_says_whose_change_and_claim_what_runs_and_why_the_rest_does_not(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 200)
    assert _exit_code(["plan", "--repo", str(repository), "--stage", "kernels", "--nonce", NONCE]) == 0
    words = " ".join(re.sub("[\u2500-\u257f]", " ", capsys.readouterr().out).split())
    assert "claim k3_decode of pack k3_decode policy fast_track, at tier smoke" in words
    assert "1 file, 1 line added" in words
    assert "kernels 96 276 sm_90a at rank" in words
    assert "policy fast_track also asks for what the column `still needed elsewhere` names" in words
    assert "22 of kernels, such as" in words
    assert "The guard takes each op at every edge of the envelope and declines one step outside." in words
    assert "needs a machine with sm_90a; this one has cpu" in words
    assert "what was seen" not in words
    assert words.count("needs a machine") == 1


def test_a_commit_that_is_not_checked_out_is_refused_with_the_commands_that_judge_it(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "new.md").write_text("text\n")
    assert _exit_code(["plan", "--repo", str(repository), "--policy", "smoke"]) == 2
    (repository / "new.md").unlink()
    head = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    command = f"git -C {repository} worktree add --detach ../judged-{head[:12]} {head}"
    said = capsys.readouterr().err
    assert f"`{command}`, then --repo ../judged-{head[:12]}" in said
    subprocess.run(command.split(), check=True, capture_output=True)
    folder = str(repository.parent / f"judged-{head[:12]}")
    assert _exit_code(["plan", "--repo", folder, "--policy", "smoke", "--stage", "isolation"]) == 0


def test_a_repository_with_another_pack_than_is_installed_is_refused_with_what_brings_it(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(repository), str(clone)], check=True)
    (clone / "kernels" / "k3_decode").mkdir(parents=True)
    (clone / "kernels" / "k3_decode" / "pack.py").write_text("'another pack'\n")
    git = ["git", "-C", str(clone), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "add", "kernels"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "pack"], check=True)
    assert _exit_code(["plan", "--repo", str(clone), "--policy", "smoke"]) == 2
    said = capsys.readouterr().err
    assert "pack k3_decode has other files at" in said
    assert f"run with its own: `PYTHONPATH={clone}/kernels fasttrack ...`" in said


def test_a_plan_names_every_check_on_request(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--repo", str(repository), "--stage", "isolation", "--policy", "smoke", "--all"]
    assert _exit_code(arguments) == 0
    assert "such as" not in capsys.readouterr().out


def test_an_empty_range_is_planned_with_a_warning(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--repo", str(repository), "--base", "HEAD", "--stage", "isolation", "--json"]
    assert _exit_code(arguments) == 0
    assert "HEAD..HEAD changes no file, so isolation has no evidence" in capsys.readouterr().err


def test_a_long_id_keeps_both_of_its_ends() -> None:
    assert shortened("kernels/router", 14) == "kernels/router"
    assert shortened("kernels/router/guard/cpu", 14) == "kernel\u2026ard/cpu"
    assert len(shortened("kernels/router/guard/cpu", 15)) == 15


def test_skipped_checks_are_told_once_a_reason() -> None:
    def skipped(check: str, summary: str) -> Outcome:
        return Outcome(
            check=check, status=Status.SKIPPED, tier=Tier.SMOKE, summary=summary, next_step="go there"
        )

    rows = _skipped_rows(
        [skipped("sweep/a", "no GPU"), skipped("sweep/b", "needs two"), skipped("sweep/c", "no GPU")]
    )
    assert rows == [
        ("SKIPPED", "2 checks, such as sweep/a", "no GPU. go there"),
        ("SKIPPED", "sweep/b", "needs two. go there"),
    ]
