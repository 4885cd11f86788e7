"""A server as a process of ours: started, waited for, and ended whatever happens.

A server that does not come up is told in words: what it printed last, and what that mostly means (memory, a
port, a model, an option that it refuses). It runs in a process group of its own, which is ended as a whole,
and dies with us. Whatever it started that left the group is found by a variable that all of them inherit, and
ended too.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.domain.errors import InputError, ServiceError

__all__ = ["ServerProcess", "free_port", "why_it_ended"]

HOST = "127.0.0.1"
POLL_S = 0.25
END_S = 15.0
"""For an orderly end; then the group is killed."""
LAST_LINES = 12
MARK = "FASTTRACK_SERVER_RUN"
"""Variable by which a server's processes are told from others."""
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"out of memory|OutOfMemory|Cannot allocate memory|bad_alloc|No available memory for the cache|"
        r"less than desired GPU memory|KV cache is needed, which is larger|less than requested memory for kv",
        "it ran out of memory: serve a shorter context or fewer sequences, or leave it more memory",
    ),
    (r"Address already in use|Errno 98", "its port is in use: leave `port` at 0, or end what listens there"),
    (
        r"Repo(sitory)?.?Not.?Found|is not a local folder|does not exist|No such file.*config\.json|"
        r"Invalid repository ID|Repo id must be in the form|Can't load the configuration|"
        r"OfflineModeIsEnabled|couldn't connect to .*hugg|cannot find the requested files in the",
        "it does not find the model: name an existing folder, or a hub id that can be reached from here",
    ),
    (r"unrecognized arguments|invalid choice|error: argument", "it does not know one of its arguments"),
    (
        r"does not support this GPU|Failed to infer device type|no CUDA-capable device",
        "it cannot run on this machine",
    ),
)
"""What a log says, and what that means."""
_KILLED = "something killed it from outside, mostly the kernel for want of memory"


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raises `InputError` where something listens there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, port)) == 0:
            raise InputError(
                f"port {port} is in use, so a server of ours would not be the one that answers there; leave "
                "`port` at 0 in the server settings, or end what listens there"
            )


class ServerProcess:
    """One running server. Use as a context manager."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        require_free(port)
        self.port, self.log, self._command = port, log, tuple(command)
        self._mark = uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file = log.open("wb")
        try:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            self._file.close()
            raise ServiceError(
                f"{self._command[0]} cannot be started ({error.strerror}); name the program that serves "
                "under `program` in the server settings, such as [/path/to/env/bin/vllm]"
            ) from error

    def wait_until(self, is_ready: Callable[[], bool], limit_s: float) -> float:
        """Seconds until it was ready; raises `ServiceError` where it ends before, or takes too long."""
        begun = time.monotonic()
        while not is_ready():
            if self.exit_code() is not None:
                raise ServiceError(f"the server ended before it was ready: {self.why_it_ended()}")
            if time.monotonic() - begun > limit_s:
                cause = _cause_of(self.log.read_text("utf-8", "replace"))
                told = f"it says why: {cause}" if cause else "see what it waits for"
                raise ServiceError(
                    f"the server was not ready within {limit_s:.0f} s and was ended; give it longer with "
                    f"`start_limit_s`, or {told}. Its last words:\n{self.last_words()}"
                )
            time.sleep(POLL_S)
        if self.exit_code() is not None:
            raise ServiceError(
                f"something answers on port {self.port}, and it is not the server that was started, which "
                f"ended: {self.why_it_ended()}"
            )
        return time.monotonic() - begun

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The end of its log."""
        self._file.flush()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LAST_LINES:]) or "none"

    def why_it_ended(self) -> str:
        """In words, from its exit code and its log."""
        code = self.exit_code()
        return why_it_ended(0 if code is None else code, self.log.read_text("utf-8", "replace"))

    def close(self) -> None:
        """End it and everything that it started."""
        group = self._process.pid
        for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
            limit = time.monotonic() + patience
            while time.monotonic() < limit:
                self._process.poll()
                if not _is_alive(group):
                    break
                time.sleep(0.05)
            else:
                continue
            break
        self._process.wait(timeout=END_S)
        for process in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        self._file.close()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def why_it_ended(code: int, log: str) -> str:
    """What an ended server's exit code and log amount to."""
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    cause = _cause_of(log) or (_KILLED if code == -signal.SIGKILL else "")
    lines = [line for line in log.splitlines() if line.strip()][-LAST_LINES:]
    cause = f"; {cause}" if cause else ""
    return f"{ended}{cause}. Its last words:\n" + ("\n".join(lines) or "none")


def _cause_of(log: str) -> str:
    """What a log amounts to; empty where it names nothing that is known."""
    causes = (words for pattern, words in _CAUSES if re.search(pattern, log, re.IGNORECASE))
    return next(causes, "")


def _marked(mark: str) -> tuple[int, ...]:
    """Processes of a run that left its group; none where the system does not tell."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
        except OSError:  # it has gone, or is somebody else's
            continue
    return tuple(found)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _die_with_parent() -> None:
    """In the child, before it becomes the server: SIGTERM when the process that started it is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
