"""Git as a subprocess, with nothing of the judged repository allowed to run.

Invariant: a command started here reads no system or user configuration, runs no hook, filter, pager, editor,
fsmonitor or transport, takes no lock in the repository, and returns at most the bytes it was allowed.
"""

import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from harness.domain.errors import InputError

__all__ = ["GitFailed", "OutputTooLarge", "hardened_environment", "run_git"]

CONFIG: Final = {
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.untrackedCache": "false",
    "core.checkStat": "default",
    "core.trustctime": "true",
    "core.ignoreStat": "false",
    "core.quotePath": "true",
    "core.pager": "cat",
    "core.sshCommand": "false",
    "core.askPass": "true",
    "core.commitGraph": "false",
    "credential.helper": "",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "safe.directory": "*",
    "submodule.recurse": "false",
}
"""Settings that could start a program or hide a change, each given a harmless value."""
MAX_OUTPUT: Final = 64 * 2**20


class GitFailed(Exception):
    """Git exited with an error; `str` is the last line that it said."""


class OutputTooLarge(Exception):
    """Git wanted to say more than was allowed."""


def hardened_environment(extra_config: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of every git command. Nothing is inherited but the search path."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": "/dev/null",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
        "GIT_EDITOR": "false",
    }
    settings = {**CONFIG, **(extra_config or {})}
    for index, (key, value) in enumerate(settings.items()):
        environment[f"GIT_CONFIG_KEY_{index}"] = key
        environment[f"GIT_CONFIG_VALUE_{index}"] = value
    environment["GIT_CONFIG_COUNT"] = str(len(settings))
    return environment


def run_git(
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    max_output: int = MAX_OUTPUT,
) -> bytes:
    """What one command wrote; raises `GitFailed`, `OutputTooLarge`, or `InputError` for no git or no end."""
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(
                ["git", "--no-pager", "--literal-pathspecs", *arguments],
                cwd=folder,
                env=dict(environment) if environment is not None else hardened_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
            )
        except FileNotFoundError as error:
            missing = "git" if folder.is_dir() else str(folder)
            raise InputError(
                f"{missing} was not found; install git 2.31 or newer, or correct the path"
            ) from error
        with process:
            output = _read_bounded(process, max_output, timeout_s)
        if process.returncode != 0:
            complaints.seek(0)
            lines = complaints.read(65536).decode("utf-8", "replace").strip().splitlines() or ["no message"]
            raise GitFailed(lines[-1][:300])
        return output


def _read_bounded(process: subprocess.Popen[bytes], max_output: int, timeout_s: float) -> bytes:
    """Everything on stdout; a watchdog ends a command that takes too long, as a read cannot."""
    assert process.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        process.kill()

    watchdog = threading.Timer(timeout_s, end)
    watchdog.start()
    try:
        output = process.stdout.read(max_output + 1)
        if len(output) > max_output:
            process.kill()
            raise OutputTooLarge
        process.wait()
    finally:
        watchdog.cancel()
    if is_late.is_set():
        raise InputError(
            f"a git command took over {timeout_s:.0f} s; judge a smaller range, or raise the time limit"
        )
    return output
