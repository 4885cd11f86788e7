"""The command line: exit codes, quick help, one paragraph for bad input."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from harness.cli.main import COMMANDS, _exit_code
from harness.domain.errors import InputError


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sys, harness.cli.main; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_an_unknown_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["validate", "--nope"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--pack", "nobody"], "no kernel pack is called 'nobody'"),
        (["plan", "--policy", "nobody"], "nobody"),
        (["plan", "--stage", "luck", "--policy", "smoke"], "--stage 'luck' is no stage"),
        (["plan", "--claim", "/nowhere/claim.yaml", "--policy", "smoke"], "/nowhere/claim.yaml"),
        (["plan", "--repo", "/tmp", "--policy", "smoke"], "/tmp"),
        (["plan", "--base", "no-such-revision", "--policy", "smoke"], "no-such-revision"),
        (["plan", "--machine", "/nowhere.json", "--policy", "smoke"], "no machine description"),
        (["plan", "--tier", "rank", "--policy", "smoke"], "tier rank needs one GPU of a supported kind"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


def test_a_crash_of_ours_is_exit_code_2_and_not_a_rejection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(COMMANDS, "doctor", ("broken", broken))
    assert _exit_code(["doctor"]) == 2
    assert "a fault of its own" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (InputError("wrong"), 2)])
def test_interrupts_and_errors_have_their_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setitem(COMMANDS, "doctor", ("broken", broken))
    assert _exit_code(["doctor"]) == code


def test_an_interrupted_command_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def slow() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "doctor", ("slow", lambda: typer.main.get_command(app)))
    assert _exit_code(["doctor"]) == 130
    assert (
        capsys.readouterr().err == "interrupted; finished checks are kept, and --resume goes on from there\n"
    )


def test_doctor_json_is_one_document_that_plan_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["cpu_count"] >= 1
    (tmp_path / "machine.json").write_text(text)
    assert _exit_code(["plan", "--machine", str(tmp_path / "machine.json"), "--pack", "nobody"]) == 2


def test_a_run_folder_that_holds_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    code = _exit_code(["run", "sweep", "--policy", "smoke", "--allow-dirty", "--out", str(tmp_path)])
    assert code == 2
    assert "already holds something" in capsys.readouterr().err
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_folder_where_a_file_is_to_be_written_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: Path) -> Callable[..., Any]:
        return lambda **_: SimpleNamespace(main=lambda **_: file.read_bytes())

    monkeypatch.setattr(typer.main, "get_command", lambda app: broken(tmp_path)())
    assert _exit_code(["report", "--html", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}: Is a directory; name another file or folder" in said
    assert "Traceback" not in said
    assert _exit_code(["report"]) == 2  # nobody named it: a fault of our own
    assert "Traceback" in capsys.readouterr().err


def test_a_repository_that_is_none_is_no_rejection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["gate", str(tmp_path / "bundle"), "--repo", str(tmp_path)]) == 2
    assert "is no git repository" in capsys.readouterr().err
