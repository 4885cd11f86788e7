"""Ops under compute-sanitizer: the tool is fake, its reports are as the real one words them."""

import os
import stat
from pathlib import Path

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Status
from harness.stages.kernels.children import OpJob
from harness.stages.kernels.sanitizing import SanitizerRun, run_sanitizers

CLEAN = "========= ERROR SUMMARY: 0 errors"
PLANTED = "========= Invalid __global__ write of size 4 bytes at: memcheck\n========= ERROR SUMMARY: 1 error"
RACES = (
    "========= Error: Race reported between Write access at attend\n"
    "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
)


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    control: str,
    *,
    has_tool: bool = True,
    open_only: str = "",
) -> SanitizerRun:
    """One op under memcheck, where the tool says `op` of it and `control` of the planted fault."""
    programs = folder / "bin"
    programs.mkdir()
    if has_tool:
        tool = programs / "compute-sanitizer"
        text = f'case "$*" in *sanitize_control*) cat {folder}/control;; *) cat {folder}/op;; esac'
        tool.write_text(f"#!/bin/sh\n{open_only}\n{text}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (folder / "op").write_text(op + "\n")
    (folder / "control").write_text(control + "\n")
    rest = [p for p in os.environ["PATH"].split(":") if not (Path(p) / "compute-sanitizer").exists()]
    monkeypatch.setenv("PATH", ":".join([str(programs), *rest]))
    job = OpJob(
        pack="example", op="twice", cell=Cell(arch="sm_90a"), model="small", implementation="cute",
        regime="gaussian", seeds=(1,), folder=str(folder / "job"),
    )  # fmt: skip
    seen: list[SanitizerRun] = []
    (found,) = run_sanitizers([job], ("memcheck",), 2, 20, seen.append)
    assert seen == [found]
    return found


def test_an_op_of_which_the_tool_says_nothing_passes_where_it_reported_the_planted_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, monkeypatch, CLEAN, PLANTED)

    assert (found.status, found.errors, found.control_errors) == (Status.PASS, 0, 1)


def test_what_the_tool_reports_of_an_op_fails_with_its_first_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, monkeypatch, RACES, PLANTED)

    assert (found.status, found.errors) == (Status.FAIL, 2)
    assert found.words == "memcheck reports 2: Error: Race reported between Write access at attend"


def test_a_tool_that_does_not_report_the_planted_fault_proves_nothing_by_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, monkeypatch, CLEAN, CLEAN)

    assert (found.status, found.control_errors) == (Status.NO_EVIDENCE, 0)


def test_an_op_that_does_not_end_under_the_tool_fails_with_the_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, monkeypatch, "Segmentation fault", PLANTED)

    assert (found.status, found.errors) == (Status.FAIL, None)
    assert found.words == "the op did not end under memcheck: exit code 0; Segmentation fault"


def test_a_tool_that_works_only_with_the_network_open_is_run_so_and_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.readlink("/proc/self/ns/net")
    in_a_namespace = f'[ "$(readlink /proc/self/ns/net)" = "{ours}" ] || exit 1'
    found = run(tmp_path, monkeypatch, CLEAN, PLANTED, open_only=in_a_namespace)

    assert found.status is Status.PASS
    assert "the network is open" in found.sandbox


def test_without_the_tool_a_run_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, CLEAN, PLANTED, has_tool=False)

    assert (found.status, found.words) == (Status.SKIPPED, "compute-sanitizer is not installed here")
