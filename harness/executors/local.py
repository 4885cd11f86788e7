"""Run candidate code in a child process, so that its crash, hang or abort is an observation and not our end.

The parent sends one check id a line; the child answers with JSON lines: `ready` (once, before it runs
anything of a candidate), `note` (what it is doing), `samples` (the answer) or `fault` (our own code broke).
Invariant: every check ends as samples of status `ran`, `crashed` or `timed_out`, or the run stops with
`HarnessFault` and the check has no samples at all. A child that ends before it is ready is ours. Work that
serves several checks, and waiting for it, is no part of a check's own time (`marks.SHARED`).
"""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from harness.domain.check import Check, Samples
from harness.domain.errors import FasttrackError
from harness.domain.machine import Tier
from harness.executors.marks import Marks
from harness.executors.sandbox import end_boxed, ended_words, sandboxed

__all__ = ["ChildSampler", "HarnessFault"]

GRACE_S = 120.0
"""Least time that any check gets: imports and first-use compilation fall into the first one."""
# OMP_NUM_THREADS: steps of small models are short, and a second OpenMP thread spins at barriers; beside one
# other busy process that made a decode step 20 times slower, and times are compared here.
PATIENCE = 30.0
"""A check may take this many times its estimate before it counts as hung."""


START_S = 300.0
"""Until a child is ready: imports alone, but on a machine that may be busy."""
LAST_WORDS = 1500
"""Bytes of a child's log that a fault quotes."""


class HarnessFault(FasttrackError):
    """The harness itself broke while sampling: no outcome, the plan stays incomplete."""


class ChildSampler:
    """Samples checks one after another in a child that is started on first use and again after a crash."""

    def __init__(
        self,
        argv: Sequence[str],
        tier: Tier,
        on_note: Callable[[str], None],
        log: IO[bytes],
        *,
        has_network: bool = False,
    ) -> None:
        self._argv = tuple(argv)
        self._has_network = has_network
        self._tier = tier
        self._on_note = on_note
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_ready = False
        self._shared_s = 0.0

    def sample(self, check: Check) -> Samples:
        """Samples of one check; raises `HarnessFault` when our own code broke."""
        marks = Marks(
            self._shared_s
        )  # one budget for all checks: else compiling for ever would cost each of it
        try:
            return self._sample(check, marks)
        finally:
            self._shared_s += marks.shared_s()

    def _sample(self, check: Check, marks: Marks) -> Samples:
        begun = time.monotonic()
        child = self._started()
        if child.stdin is None:
            raise AssertionError("the child was started without a pipe for its input")
        try:
            child.stdin.write(check.id.encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            return self._ended(check, begun)
        limit = begun + max(GRACE_S, PATIENCE * check.cost_s) if self._is_ready else begun + START_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, marks.deadline(limit) - time.monotonic()))
            except queue.Empty:
                self._kill()
                self._require_ready("did not start in time")
                spent = time.monotonic() - begun
                return Samples(
                    check=check.id, tier=self._tier, ended="timed_out", duration_s=spent,
                    detail=f"no answer after {spent:.0f} s; the estimate was {check.cost_s:.1f} s",
                )  # fmt: skip
            if line is None:
                return self._ended(check, begun)
            answer = json.loads(line)
            if "ready" in answer:
                self._is_ready = True
                limit = time.monotonic() + max(GRACE_S, PATIENCE * check.cost_s)
            elif "mark" in answer:
                marks.add(str(answer["mark"]))
            elif "note" in answer:
                self._on_note(str(answer["note"]))
            elif "obstacle" in answer:
                self._kill()
                raise HarnessFault(
                    f"{check.id} could not be sampled, which says nothing of the candidate; finished checks "
                    f"are kept and --resume goes on: {answer['obstacle']}"
                )
            elif "fault" in answer:
                self._kill()
                raise HarnessFault(
                    f"the harness broke while sampling {check.id}; finished checks are kept and --resume "
                    "goes on "
                    f"after a repair. Its own words:\n{answer['fault']}"
                )
            else:
                return marks.attach(Samples.model_validate(answer["samples"]))

    def close(self) -> None:
        """End the child."""
        self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._lines = queue.SimpleQueue()
            self._is_ready = False
            threads = os.environ.get("FASTTRACK_THREADS", "1")
            box = sandboxed(self._argv, has_network=self._has_network, OMP_NUM_THREADS=threads)
            self._log.write(f"sandbox: {box.words}\n".encode())
            self._child = subprocess.Popen(
                box.argv,
                env=box.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
            )
            threading.Thread(target=_pump, args=(self._child.stdout, self._lines), daemon=True).start()
        return self._child

    def _ended(self, check: Check, begun: float) -> Samples:
        """The child is gone without an answer: name the signal or the exit code."""
        code = self._child.wait() if self._child is not None else 0
        self._kill()
        word = ended_words(code)
        self._require_ready(f"ended with {word} before it was ready")
        return Samples(
            check=check.id, tier=self._tier, ended="crashed", duration_s=time.monotonic() - begun,
            detail=f"the process that ran the candidate ended with {word}",
        )  # fmt: skip

    def _require_ready(self, what: str) -> None:
        """Raise `HarnessFault` where the child never got as far as a candidate's code."""
        if not self._is_ready:
            raise HarnessFault(
                f"the process that samples {what}, so nothing was learned about the candidate; finished "
                "checks are kept and --resume goes on after a repair. Its last words:\n"
                f"{self._last_words()}"
            )

    def _last_words(self) -> str:
        """The end of the child's log."""
        self._log.flush()
        try:
            with open(self._log.name, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return "none could be read"

    def _kill(self) -> None:
        if self._child is None:
            return
        # The child leads a session of its own: compilers that it started end with it.
        end_boxed(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with _ignoring_broken_pipe():
                    pipe.close()
        self._child = None


@contextmanager
def _ignoring_broken_pipe() -> Iterator[None]:
    """Closing a pipe flushes it, and the reader may be dead already."""
    try:
        yield
    except BrokenPipeError:
        return


def _pump(pipe: IO[bytes] | None, lines: "queue.SimpleQueue[bytes | None]") -> None:
    """Hand the child's lines over; None at its end."""
    if pipe is not None:
        try:
            for line in pipe:
                lines.put(line)
        except ValueError:  # closed by `_kill` while we waited
            pass
    lines.put(None)
