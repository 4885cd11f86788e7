"""One call of an op under NVIDIA's compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

The op runs in a sandboxed child of the tool, every tensor in an allocation of its own, so that a byte beyond
one is seen. Control: a small kernel of ours that does what the tool must report runs first, once a tool;
where the tool does not report it, its silence about an op is no evidence. A tool that cannot reach its child
in an empty network namespace is run with the network open, and every run says so.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field

from harness.domain.cell import Cell
from harness.domain.check import Status
from harness.domain.record import Digest, Record, Whole
from harness.executors.sandbox import sandboxed
from harness.stages.kernels.children import OpJob, child_command, run_child, write_job

__all__ = ["LIMIT_S", "TOOLS", "SanitizerRecord", "SanitizerRun", "Tool", "run_sanitizers"]

Tool = Literal["memcheck", "racecheck", "synccheck", "initcheck"]
TOOLS: tuple[Tool, ...] = ("memcheck", "racecheck", "synccheck", "initcheck")
LIMIT_S = 300.0
CONTROL_LIMIT_S = 90.0
OPTIONS: Mapping[Tool, tuple[str, ...]] = {"memcheck": ("--report-api-errors", "no")}
"""Beside the tool's name. Calls of the driver that fail on purpose, as when a library asks what there is, are
no errors of a kernel."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")


class SanitizerRun(Record):
    """What one tool said of one op in one cell."""

    op: str
    cell: Cell
    model: str
    tool: Tool
    status: Status
    errors: Whole | None
    """What the tool's summary counts; None where it gave none."""
    control_errors: Whole | None
    words: str = Field(max_length=600)
    sandbox: str = ""
    """What the child lacked and had."""


class SanitizerRecord(Record):
    """One run of the tools over some ops, bound to the code that ran."""

    schema_version: Literal[1] = 1
    harness_digest: Digest
    pack: str
    pack_digest: Digest
    seed: Whole
    created: AwareDatetime
    gpus: tuple[str, ...]
    runs: tuple[SanitizerRun, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Said:
    """What one child of a tool left."""

    errors: int | None
    words: str
    sandbox: str
    is_open: bool


def run_sanitizers(
    jobs: Sequence[OpJob],
    tools: Sequence[Tool],
    workers: int,
    limit_s: float,
    on_run: Callable[[SanitizerRun], None],
) -> tuple[SanitizerRun, ...]:
    """Every op under every tool, several at once; SKIPPED where compute-sanitizer is not installed.

    Each job's folder is its own.
    """
    program = shutil.which("compute-sanitizer")
    pairs = [(job, tool) for job in jobs for tool in tools]

    def run(pair: tuple[OpJob, Tool]) -> SanitizerRun:
        found = _run(program, *pair, controls, limit_s)
        on_run(found)
        return found

    with ThreadPoolExecutor(workers) as pool:
        controls: Mapping[Tool, _Said] = (
            {}
            if program is None
            else dict(zip(tools, pool.map(_control_of(program, jobs[0]), tools), strict=True))
        )
        return tuple(pool.map(run, pairs))


def _control_of(program: str, job: OpJob) -> Callable[[Tool], _Said]:
    """What runs a tool over the kernel that it must report, in the sandbox and, if need be, beside it."""

    def control(tool: Tool) -> _Said:
        said = _reported(program, "sanitize_control", tool, job, CONTROL_LIMIT_S, is_open=False)
        if said.errors is None:
            said = _reported(program, "sanitize_control", tool, job, CONTROL_LIMIT_S, is_open=True)
        return said

    return control


def _run(
    program: str | None, job: OpJob, tool: Tool, controls: Mapping[Tool, _Said], limit_s: float
) -> SanitizerRun:
    if program is None:
        return _outcome(job, tool, Status.SKIPPED, None, None, "compute-sanitizer is not installed here")
    control = controls[tool]
    said = _reported(program, "sanitize", tool, job, limit_s, is_open=control.is_open)
    if said.errors is None:
        status, words = Status.FAIL, f"the op did not end under {tool}: {said.words}"
    elif said.errors:
        status, words = Status.FAIL, f"{tool} reports {said.errors}: {said.words}"
    elif not control.errors:
        status, words = Status.NO_EVIDENCE, f"{tool} did not report the planted fault: {control.words}"
    else:
        status, words = Status.PASS, f"{tool} reports nothing, and {control.errors} of the planted fault"
    return _outcome(job, tool, status, said, control, words)


def _reported(program: str, mode: str, tool: Tool, job: OpJob, limit_s: float, *, is_open: bool) -> _Said:
    """(errors in the tool's summary, None where it gives none; its first complaint, or its last words)."""
    folder = Path(job.folder)
    path = write_job(folder, f"{mode}.{tool}", job.model_copy(update={"regime": f"{tool}:{job.regime}"}))
    command = (program, "--tool", tool, *OPTIONS.get(tool, ()), *child_command(mode, path))
    box = sandboxed(command, has_network=is_open, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    log = folder / f"{mode}.{tool}.log"
    ended = run_child(box.argv, box.environment, log, limit_s)
    text = log.read_text(encoding="utf-8", errors="replace")
    found = SUMMARY.findall(text)
    complaints = [line[10:] for line in text.splitlines() if line.startswith("========= ") and ":" in line]
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    words = complaints[0] if complaints else f"{ended}; {last}"
    return _Said(int(found[-1]) if found else None, words[:300], box.words, is_open)


def _outcome(
    job: OpJob, tool: Tool, status: Status, said: _Said | None, control: _Said | None, words: str
) -> SanitizerRun:
    return SanitizerRun(
        op=job.op, cell=job.cell, model=job.model, tool=tool, status=status,
        errors=said.errors if said else None, control_errors=control.errors if control else None,
        words=words[:600], sandbox=said.sandbox if said else "",
    )  # fmt: skip
