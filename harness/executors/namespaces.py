"""Namespaces of its own for a process that runs candidate code: users, processes, mounts, network.

What they give: the process cannot look into others of the same user (their environment, open files, memory),
cannot signal them, and all that it starts ends with it; the kernel's settings are read-only, even for the
superuser. `sealed` adds that everything is read-only but one folder, that /dev holds no disk, that the home
folder is empty, and that sockets which lie as files, such as a container engine's, are covered
(`first_process`).
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

__all__ = ["USERS", "Form", "can_run", "open_sockets", "own_namespaces"]

Form = Literal["open", "sealed"]
USERS = ("unshare", "--user", "--map-current-user")
"""The least: nothing of other processes can be opened, as they belong to another namespace of users."""
FIRST = Path(__file__).with_name("first_process.py")
UNIX_SOCKETS = Path("/proc/net/unix")
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


def open_sockets(scratch: Path | None, has_gpu: bool) -> tuple[str, ...]:
    """Sockets that somebody listens on now and whose files are here, but for those below `scratch` and,
    where a GPU is used, those of its own service.

    A read-only mount keeps nobody from connecting, and a network of one's own only from sockets without a
    file. One that is made later is not among them.
    """
    try:
        lines = UNIX_SOCKETS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    except OSError:
        return ()
    fields = (line.split(" ", 7) for line in lines)
    paths = {f[7].strip() for f in fields if len(f) == 8 and f[7].strip().startswith("/")}
    left_open = (f"{scratch}/" if scratch is not None else "\0", *(GPU_SERVICES if has_gpu else ()))
    return tuple(sorted(path for path in paths if not path.startswith(left_open) and _is_socket(path)))


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def can_run(wrapper: Sequence[str], probe: Sequence[str] = ("true",)) -> bool:
    """Whether a command ends well behind these words here."""
    if sys.platform != "linux" or shutil.which(wrapper[0]) is None:
        return False
    try:
        done = subprocess.run((*wrapper, *probe), capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
