"""Folders of lanes: a living lane keeps its own, and what a killed one left is removed by the next."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.executors.ray_lane import HELD, PREFIX, clear_left

HOLD = """
import sys, time
from harness.executors.ray_lane import _own_folder
folder, held = _own_folder()
(folder / "logs").mkdir()
print(folder, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_the_folder_of_a_lane_that_was_killed_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    lanes = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = [Path(lane.stdout.readline().strip()) for lane in lanes if lane.stdout is not None]
    try:
        assert clear_left() == 0
        lanes[0].kill()
        lanes[0].wait()
        assert clear_left() == 1
        assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for lane in lanes:
            lane.kill()
            lane.communicate()


def test_folders_that_no_lane_made_are_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / f"{PREFIX}mine"
    stranger.mkdir()
    assert clear_left() == 0
    assert stranger.exists()
    assert not (stranger / HELD).exists()
