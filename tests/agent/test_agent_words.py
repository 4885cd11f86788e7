"""Words of an agent never become paths, options or what was not looked at."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.agent.verdicts import VerdictDesk
from harness.agent.workspace import read_change
from harness.domain.errors import InputError


@pytest.mark.parametrize("stage", ["../victim", "/tmp/victim", "evals --engine vllm", ""])
def test_a_stage_that_is_none_deletes_and_runs_nothing(stage: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    desk = cast(Any, SimpleNamespace(_folder=tmp_path / "desk"))

    with pytest.raises(InputError, match="is no stage"):
        VerdictDesk.run_stage(desk, {}, stage, "smoke", ())

    assert (victim / "file").read_text() == "kept"


def test_a_link_that_replaced_a_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, secret = tmp_path / "workspace", tmp_path / "secret"
    workspace.mkdir()
    secret.write_text("secret")
    place = workspace / "op.py"
    place.write_text("x = 1\n")
    opened = os.open

    def swapped(path: Any, flags: int, *more: Any) -> int:
        place.unlink()
        place.symlink_to(secret)
        return opened(path, flags, *more)

    monkeypatch.setattr("harness.agent.workspace.os.open", swapped)
    with pytest.raises(InputError, match="cannot be read as a plain file"):
        read_change(workspace, {"op.py": "x = 0\n"})
