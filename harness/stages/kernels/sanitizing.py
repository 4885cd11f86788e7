"""One call of an op under NVIDIA's compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

The op runs in a sandboxed child of the tool, every tensor in an allocation of its own, so that a byte beyond
one is seen. Control: a small kernel of ours that does what the tool must report runs under the same tool
first; where the tool does not report it, its silence about the op is no evidence.
"""

import re
import shutil
from pathlib import Path
from typing import Literal

from harness.domain.cell import Cell
from harness.domain.check import Status
from harness.domain.record import Record, Whole
from harness.executors.sandbox import sandboxed
from harness.stages.kernels.children import OpJob, child_command, run_child, write_job

__all__ = ["TOOLS", "SanitizerRun", "Tool", "run_sanitizer"]

Tool = Literal["memcheck", "racecheck", "synccheck", "initcheck"]
TOOLS: tuple[Tool, ...] = ("memcheck", "racecheck", "synccheck", "initcheck")
LIMIT_S = 300.0
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")


class SanitizerRun(Record):
    """What one tool said of one op in one cell."""

    op: str
    cell: Cell
    model: str
    tool: Tool
    status: Status
    errors: Whole | None
    control_errors: Whole | None
    words: str


def run_sanitizer(job: OpJob, tool: Tool, folder: Path) -> SanitizerRun:
    """Run the control and the op under a tool; SKIPPED where the tool is not installed."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return _said(job, tool, Status.SKIPPED, None, None, "compute-sanitizer is not installed here")
    control, _ = _reported(program, "sanitize_control", tool, job, folder)
    errors, words = _reported(program, "sanitize", tool, job, folder)
    if errors is None:
        return _said(job, tool, Status.FAIL, None, control, f"the op did not end under {tool}: {words}")
    if errors:
        return _said(job, tool, Status.FAIL, errors, control, f"{tool} reports {errors}: {words}")
    if not control:
        return _said(
            job, tool, Status.NO_EVIDENCE, errors, control, f"{tool} did not report the planted fault"
        )
    return _said(
        job, tool, Status.PASS, 0, control, f"{tool} reports nothing, and {control} of the planted fault"
    )


def _reported(program: str, mode: str, tool: Tool, job: OpJob, folder: Path) -> tuple[int | None, str]:
    """(errors in the tool's summary, None where it gives none; its first complaint)."""
    path = write_job(folder, f"{mode}.{tool}", job.model_copy(update={"regime": f"{tool}:{job.regime}"}))
    command = (program, "--tool", tool, *child_command(mode, path))
    box = sandboxed(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    log = folder / f"{mode}.{tool}.log"
    ended = run_child(box.argv, box.environment, log, LIMIT_S)
    text = log.read_text(encoding="utf-8", errors="replace")
    found = SUMMARY.findall(text)
    complaints = [line for line in text.splitlines() if line.startswith("========= ") and ":" in line]
    return (int(found[-1]) if found else None), (complaints[0][10:300] if complaints else ended)


def _said(
    job: OpJob, tool: Tool, status: Status, errors: int | None, control: int | None, words: str
) -> SanitizerRun:
    return SanitizerRun(
        op=job.op, cell=job.cell, model=job.model, tool=tool, status=status, errors=errors,
        control_errors=control, words=words[:600],
    )  # fmt: skip
