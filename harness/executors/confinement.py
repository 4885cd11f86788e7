"""A stricter sandbox for code that an agent wrote: the file system is read-only but for one scratch folder.

Built on `sandbox`: the same scrubbed environment, and no network. Where the machine has bubblewrap, or
`unshare` with mount namespaces, the process also has its own process ids, sees everything read-only, has no
home folder, and everything that it started ends with it. What could not be had is said in `words`, never
passed over.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from harness.domain.record import Positive, Record
from harness.executors.sandbox import Sandbox, sandboxed, scrubbed

__all__ = ["Limits", "confined", "confinement_here"]

Kind = Literal["bubblewrap", "unshare", "none"]
SETUP = """set -e
scratch=$1; home=$2; shift 2
mount --make-rprivate /
mount --bind "$scratch" "$scratch"
cut -d' ' -f2 /proc/self/mounts | sort -u | while read -r at; do
  case "$at" in "$scratch"|/proc|/proc/*|/sys|/sys/*) continue;; esac
  mount -o remount,bind,ro "$at" 2>/dev/null || true
done
mount -t tmpfs -o size=256m none /dev/shm
if [ -n "$home" ]; then mount -t tmpfs -o size=1m none "$home"; fi
cd "$scratch"
exec "$@"
"""
"""Run as root of a user namespace of its own: everything read-only but the scratch folder, no home."""


class Limits(Record):
    """What a confined process may use."""

    memory_bytes: Positive = 16 * 2**30
    """Address space; not limited where a GPU is used, as its driver reserves far more than it takes."""
    processes: Positive = 512
    """Of this user; the kernel holds the superuser to none."""
    file_bytes: Positive = 256 * 2**20
    """Of one file, its log included."""


def confined(
    argv: Sequence[str], scratch: Path, limits: Limits, more: Mapping[str, str] | None = None, *,
    has_gpu: bool = False, has_network: bool = False,
) -> Sandbox:  # fmt: skip
    """A command that can write below `scratch` alone; `more` are variables for it.

    `has_network` is for an agent itself, which talks to its model and to our server; never for a candidate.
    """
    kind = confinement_here()
    limit = _limit_command(limits, has_gpu)
    environment = scrubbed(os.environ) | {"HOME": str(scratch), "TMPDIR": str(scratch)}
    environment |= {"XDG_CACHE_HOME": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= more or {}
    if kind == "none":
        box = sandboxed((*limit, *argv), has_network=has_network)
        words = f"{box.words}; files are not protected: neither bubblewrap nor mount namespaces work here"
        return Sandbox(box.argv, environment, words)
    network = "the network is open" if has_network else "no network"
    said = [f"{kind}: {network}, files read-only but for a scratch folder, process ids of its own"]
    said += [] if has_gpu else [f"at most {limits.memory_bytes // 2**20} MiB of memory"]
    said += ["the process limit does not bind the superuser"] if _is_root() else []
    words = "; ".join([*said, f"{len(os.environ) - len(scrubbed(os.environ))} variables withheld"])
    home = _home_to_hide(scratch)
    wrapper = (_bubblewrap if kind == "bubblewrap" else _unshare)(scratch, home)
    cut = ("--unshare-net", "--net") if has_network else ()
    kept = tuple(word for word in wrapper if word not in cut)
    return Sandbox((*kept, *limit, *argv), environment, words)


@lru_cache(maxsize=1)
def confinement_here() -> Kind:
    """Which tool confines here: the first that really keeps a file from being written."""
    with tempfile.TemporaryDirectory(prefix="fasttrack-confine-") as folder:
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        outside = Path(folder) / "outside"
        probe = ("sh", "-c", f'echo in > "{scratch}/in" && ! echo out > "{outside}"')
        tools: tuple[tuple[Kind, tuple[str, ...]], ...] = (
            ("bubblewrap", _bubblewrap(scratch, None)),
            ("unshare", _unshare(scratch, None)),
        )
        for kind, wrapper in tools:
            if sys.platform != "linux" or shutil.which(wrapper[0]) is None:
                continue
            try:
                done = subprocess.run((*wrapper, *probe), capture_output=True, timeout=20, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0 and (scratch / "in").is_file() and not outside.exists():
                return kind
    return "none"


def _bubblewrap(scratch: Path, home: Path | None) -> tuple[str, ...]:
    hidden = () if home is None else ("--tmpfs", str(home))
    return (
        "bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", "/dev/shm", *hidden,
        "--proc", "/proc", "--bind", str(scratch), str(scratch), "--unshare-net", "--unshare-pid",
        "--unshare-ipc", "--die-with-parent", "--new-session", "--chdir", str(scratch), "--",
    )  # fmt: skip


def _unshare(scratch: Path, home: Path | None) -> tuple[str, ...]:
    """The capabilities that set the mounts up are given back before the command runs, so that it cannot undo
    them.
    """
    return (
        "unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--fork",
        "--kill-child", "--mount-proc", "--",
        "sh", "-c", SETUP, "sh", str(scratch), "" if home is None else str(home),
        "setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--",
    )  # fmt: skip


def _limit_command(limits: Limits, has_gpu: bool) -> tuple[str, ...]:
    if shutil.which("prlimit") is None:
        return ()
    memory = () if has_gpu else (f"--as={limits.memory_bytes}",)
    return (
        "prlimit", "--core=0", f"--fsize={limits.file_bytes}", f"--nproc={limits.processes}", *memory, "--",
    )  # fmt: skip


def _home_to_hide(scratch: Path) -> Path | None:
    """The user's home, unless the code that must run or the scratch folder lies below it."""
    home = Path(os.environ.get("HOME", "/nonexistent")).resolve()
    needed = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__), scratch, Path.cwd())
    is_needed = any(place.resolve().is_relative_to(home) for place in needed)
    return None if is_needed or not home.is_dir() else home


def _is_root() -> bool:
    return os.geteuid() == 0
