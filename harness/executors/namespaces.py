"""Namespaces of its own for a process that runs candidate code: users, processes, mounts, network.

What they give: the process cannot look into others of the same user (their environment, open files, memory),
cannot signal them, and all that it starts ends with it; the kernel's settings are read-only, even for the
superuser. `sealed` adds that everything is read-only but one folder, that /dev holds no disk, that the home
folder is empty, and that sockets which lie as files, such as a container engine's, are covered
(`first_process`).
"""

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

__all__ = ["USERS", "Form", "can_run", "open_sockets", "own_namespaces"]

Form = Literal["open", "sealed"]
USERS = ("unshare", "--user", "--map-current-user")
"""The least: nothing of other processes can be opened, as they belong to another namespace of users."""
FIRST = Path(__file__).with_name("first_process.py")
UNIX_SOCKETS = Path("/proc/net/unix")
MOUNTS = Path("/proc/self/mountinfo")
SOCKET_FOLDERS = ("/run", "/var/run", "/tmp")
MAX_ENTRIES = 50_000
"""Files below the folders of sockets that are looked at."""
GPU_SERVICES = ("/tmp/nvidia-mps/", "/run/nvidia-persistenced/", "/var/run/nvidia-persistenced/")


def own_namespaces(
    form: Form, *, has_network: bool, scratch: Path | None = None, home: Path | None = None,
    has_gpu: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Words before a command that put it into namespaces of its own; `sealed` needs `scratch`.

    A signal that ends the command shows as exit code 128 and its number, as shells say it.
    """
    network = () if has_network else ("--net",)
    apart = ("--ipc",) if form == "sealed" else ()
    own = scratch.resolve() if scratch else None
    sockets = json.dumps(open_sockets(own, has_gpu) if form == "sealed" else ())
    places = (str(own or ""), str(home or ""), "yes" if has_gpu else "", sockets)
    user, group = os.geteuid(), os.getegid()
    # Inside it is the superuser of a namespace in which nobody else is. In the open form an ordinary user is
    # given back the number that its programs know it by.
    again = () if form == "sealed" or user == 0 else (
        "unshare", "--user", f"--map-user={user}", f"--map-group={group}", "--"
    )  # fmt: skip
    return (
        "unshare", "--user", "--map-root-user", "--mount", "--pid", *apart, *network, "--fork",
        "--kill-child", "--mount-proc", "--",
        sys.executable, "-I", "-S", str(FIRST), form, *places, *again,
    )  # fmt: skip


def open_sockets(scratch: Path | None, has_gpu: bool, min_age_s: float = 0.0) -> tuple[str, ...]:
    """Files of sockets that are here now, but for those below `scratch` and, where a GPU is used, those of
    its own service: what this network's processes say they listen on, what lies where services put theirs,
    and what is mounted by itself, as an engine's is into a container.

    A read-only mount keeps nobody from connecting, and a network of one's own only from sockets without a
    file. One that is made later is not among them, nor one that is younger than `min_age_s`.
    """
    left_open = (f"{scratch}/" if scratch is not None else "\0", *(GPU_SERVICES if has_gpu else ()))
    named = (path for path in (*_listened_on(), *_mounted()) if path.startswith("/"))
    found = {path for path in (*named, *_lying_about()) if not path.startswith(left_open)}
    return tuple(sorted(path for path in found if _is_socket(path, min_age_s)))


def _listened_on() -> Iterator[str]:
    for line in _lines(UNIX_SOCKETS)[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8:
            yield fields[7]


def _mounted() -> Iterator[str]:
    for line in _lines(MOUNTS):
        fields = line.split(" ")
        if len(fields) > 4:
            yield re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])


def _lying_about() -> Iterator[str]:
    """Whatever is no file below the folders in which services put their sockets, what lies on top first."""
    seen = 0
    waiting = deque((*SOCKET_FOLDERS, os.environ.get("XDG_RUNTIME_DIR") or "/run/user"))
    while waiting and seen < MAX_ENTRIES:
        with contextlib.suppress(OSError), os.scandir(waiting.popleft()) as entries:
            for entry in entries:
                seen += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    yield entry.path


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return []


def _is_socket(path: str, min_age_s: float) -> bool:
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISSOCK(status.st_mode) and time.time() - status.st_mtime >= min_age_s


def can_run(wrapper: Sequence[str], probe: Sequence[str] = ("true",)) -> bool:
    """Whether a command ends well behind these words here."""
    if sys.platform != "linux" or shutil.which(wrapper[0]) is None:
        return False
    try:
        done = subprocess.run((*wrapper, *probe), capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
