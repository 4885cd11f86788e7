"""A child process that answers JSON lines, one an ask, under a time limit; killed as a group.

What it prints beside its answers goes to its log. Invariant: an ask ends with the answer or with
`ChildEnded`, whatever the child does: crash, hang, answer with nonsense or with far too much.
"""

import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from harness.domain.errors import FasttrackError
from harness.executors.sandbox import Sandbox, end_boxed, ended_words

__all__ = ["AskedChild", "ChildEnded"]

MOST_BYTES = 64 * 2**20
"""Of one answer."""
WORDS = 400


class ChildEnded(FasttrackError):
    """The child gave no answer; `how` says what became of it."""

    def __init__(self, how: str, last_words: str) -> None:
        super().__init__(f"{how}: {last_words}" if last_words else how)
        self.how = how


class AskedChild:
    """Started at once. Use as a context manager."""

    def __init__(self, box: Sandbox, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self._child = subprocess.Popen(
                box.argv, env=box.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink,
                start_new_session=True,
            )  # fmt: skip
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._child.stdout, self._lines), daemon=True).start()

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        """The answer to one request; raises `ChildEnded` where there is none within the limit."""
        try:
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise ChildEnded(f"no answer after {limit_s:.0f} s", self._last_words()) from None
        except (BrokenPipeError, ValueError):
            line = None
        if line is None:
            raise ChildEnded(self._how(), self._last_words())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise ChildEnded("an answer that is none", self._last_words())
        return answer

    def close(self) -> None:
        """End it and everything that it started."""
        end_boxed(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                continue

    def __enter__(self) -> "AskedChild":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _how(self) -> str:
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.close()
            return "closed its answers"
        return f"ended with {ended_words(code)}"

    def _last_words(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * WORDS))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:WORDS] if lines else ""


def _pump(pipe: IO[bytes] | None, lines: "queue.SimpleQueue[bytes | None]") -> None:
    """Hand answers over; None at the end, or where one is longer than any answer may be."""
    if pipe is not None:
        try:
            while line := pipe.readline(MOST_BYTES):
                if not line.endswith(b"\n"):
                    break
                lines.put(line)
        except ValueError:  # closed while we waited
            pass
    lines.put(None)
