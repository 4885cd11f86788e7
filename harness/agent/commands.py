"""Run a `fasttrack` command over an agent's tree, confined, and take its JSON document.

What a tool of the server answers is what `--json` prints: the command itself runs, in a process that can
write to a scratch folder only. Lines that it says on the way are progress; it ends with all that it started
when it is cancelled or out of time.

A command that runs candidate code answers for an agent to read, and no more: that code has the same user and
the same scratch folder. What decides is found by a command over a tree that nobody but us wrote.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.domain.errors import FasttrackError
from harness.executors.confinement import Limits, confined
from harness.executors.sandbox import end_boxed

__all__ = ["CommandEnded", "Ran", "run_command", "tree_variables"]

MOST_BYTES = 64 * 2**20
"""Of one document."""
COUNT = re.compile(r"\[(\d+)/(\d+)")
WORDS = 1500


class CommandEnded(FasttrackError):
    """The command gave no document: it crashed, was cancelled, or took too long."""


class Ran(NamedTuple):
    """What a command gave."""

    exit_code: int
    document: Any
    sandbox: str


def tree_variables(tree: Path, harness_root: Path | None = None) -> dict[str, str]:
    """Variables under which a process takes the pack from `tree` and the harness from here."""
    root = harness_root or Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": os.pathsep.join((str(tree), str(root))), "OMP_NUM_THREADS": "1"}


def run_command(
    arguments: Sequence[str], tree: Path, scratch: Path, *, limit_s: float, has_gpu: bool = False,
    on_progress: Callable[[int, int, str], None] | None = None, cancelled: threading.Event | None = None,
    more: Mapping[str, str] | None = None,
) -> Ran:  # fmt: skip
    """The document of `fasttrack ARGUMENTS --json`; raises `CommandEnded` where there is none."""
    call = "import sys; from harness.cli.main import entry; entry(sys.argv[1:])"
    argv = (sys.executable, "-P", "-c", call, *arguments, "--json")
    box = confined(argv, scratch, Limits(), tree_variables(tree) | dict(more or {}), has_gpu=has_gpu)
    words: list[str] = []
    # No file of the scratch folder is the document, so none can be put in its place there. That is no proof
    # against code that runs inside the command itself; see the module. It is read when the child has ended.
    sink = tempfile.TemporaryFile()  # noqa: SIM115
    child = subprocess.Popen(
        box.argv, env=box.environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.PIPE,
        start_new_session=True, cwd=scratch,
    )  # fmt: skip
    reader = threading.Thread(target=_read_words, args=(child, words, on_progress), daemon=True)
    reader.start()
    ended = _wait(child, limit_s, cancelled)
    reader.join(timeout=5)
    last = "\n".join(words[-8:])[-WORDS:]
    with sink:
        if ended:
            raise CommandEnded(f"`fasttrack {' '.join(arguments)}` {ended}; its last words:\n{last}")
        sink.seek(0)
        raw = sink.read(MOST_BYTES + 1)
    try:
        if len(raw) > MOST_BYTES:
            raise ValueError("longer than any document may be")
        return Ran(child.returncode, json.loads(raw), box.words)
    except (ValueError, RecursionError) as error:
        raise CommandEnded(
            f"`fasttrack {' '.join(arguments)}` ended with exit code {child.returncode} and no document "
            f"({error}); its last words:\n{last}"
        ) from error


def _wait(child: "subprocess.Popen[bytes]", limit_s: float, cancelled: threading.Event | None) -> str:
    """Empty once it ended by itself; otherwise why it was ended."""
    left, step = limit_s, 0.1
    try:
        while left > 0:
            try:
                child.wait(timeout=min(step, left))
                return ""
            except subprocess.TimeoutExpired:
                left -= step
                if cancelled is not None and cancelled.is_set():
                    return "was cancelled"
        return f"gave no answer after {limit_s:.0f} s"
    finally:
        end_boxed(child)


def _read_words(
    child: "subprocess.Popen[bytes]", words: list[str], on_progress: Callable[[int, int, str], None] | None
) -> None:
    """Keep the last lines; tell of those that count."""
    if child.stderr is None:
        return
    while line := child.stderr.readline(4096):
        text = line.decode("utf-8", "replace").rstrip()
        words.append(text)
        del words[:-50]
        found = COUNT.match(text)
        if found and on_progress is not None:
            try:
                on_progress(int(found[1]), int(found[2]), text)
            except CommandEnded:  # cancelled: whoever waits for the child ends it
                continue
    child.stderr.close()
