"""A stricter sandbox for code that an agent wrote: the file system is read-only but for one scratch folder.

Built on `sandbox`: the same scrubbed environment, and no network. Where the machine has bubblewrap, or
`unshare` with mount namespaces (`namespaces`, sealed), the process also sees no other process and no disk,
has everything read-only, the kernel's settings too, and no home folder; it has no capability over what is
outside, and everything that it started ends with it. What could not be had is said in `words`, never passed
over.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from harness.domain.record import Positive, Record
from harness.executors.first_process import GPU_DEVICES, KERNEL, MEMORY
from harness.executors.namespaces import can_run, open_sockets, own_namespaces
from harness.executors.sandbox import Sandbox, sandboxed, scrubbed

__all__ = ["Limits", "confined", "confinement_here", "confines"]

SETTLED_S = 60.0
"""Age from which a socket counts as there to stay."""

Kind = Literal["bubblewrap", "unshare", "none"]


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
        plain = sandboxed((*limit, *argv), has_network=has_network)
        words = f"{plain.words}; files are not protected: neither bubblewrap nor mount namespaces work here"
        return Sandbox(plain.argv, environment, words)
    network = "the network is open" if has_network else "no network"
    said = [f"{kind}: {network}, files read-only but for a scratch folder, process ids of its own"]
    said += [] if has_gpu else [f"at most {limits.memory_bytes // 2**20} MiB of memory"]
    said += ["the process limit does not bind the superuser"] if _is_root() else []
    words = "; ".join([*said, f"{len(os.environ) - len(scrubbed(os.environ))} variables withheld"])
    box = _Box(scratch, _home_to_hide(scratch), has_network, has_gpu)
    return Sandbox((*_WRAPPERS[kind](box), *limit, *argv), environment, words)


@lru_cache(maxsize=1)
def confinement_here() -> Kind:
    """Which tool confines here: the first that works."""
    return next((kind for kind in _WRAPPERS if confines(kind)), "none")


def confines(kind: Kind) -> bool:
    """Whether a tool really keeps files, settings of the kernel and processes from a command here."""
    with tempfile.TemporaryDirectory(prefix="fasttrack-confine-") as folder:
        scratch, outside = Path(folder) / "scratch", Path(folder) / "outside"
        scratch.mkdir()
        setting = Path("/proc/sys/kernel/core_uses_pid")
        script = f'echo in > "{scratch}/in" && ! echo out > "{outside}"'
        script += ' && test "$(ls -d /proc/[0-9]* | wc -l)" -lt 9'
        script += f' && ! cat "{setting}" > "{setting}"' if setting.exists() else ""
        is_kept = can_run(_WRAPPERS[kind](_Box(scratch, None)), ("sh", "-c", script))
        return is_kept and (scratch / "in").is_file() and not outside.exists()


class _Box(NamedTuple):
    """What a wrapper makes."""

    scratch: Path
    home: Path | None
    has_network: bool = False
    has_gpu: bool = False


def _bubblewrap(box: _Box) -> tuple[str, ...]:
    """Two capabilities stay, as in `first_process`; what the superuser could write below /proc is bound
    read-only.
    """
    hidden: tuple[str, ...] = () if box.home is None else ("--tmpfs", str(box.home))
    network = () if box.has_network else ("--unshare-net",)
    gpus = [str(place) for place in _gpu_devices()] if box.has_gpu else []
    settings = [w for n in KERNEL for w in ("--ro-bind-try", f"/proc/{n}", f"/proc/{n}")]
    # One that goes away before it is covered would break the box: only such as have stayed are.
    sockets = open_sockets(box.scratch.resolve(), box.has_gpu, SETTLED_S)
    hidden += tuple(word for place in sockets for word in ("--ro-bind", "/dev/null", place))
    hidden += tuple(
        w for p in MEMORY if p.startswith("/proc") and Path(p).exists() for w in ("--ro-bind", "/dev/null", p)
    )
    devices = tuple(word for place in gpus for word in ("--dev-bind", place, place))
    return (
        "bwrap", "--unshare-user", "--cap-drop", "ALL", "--cap-add", "CAP_SETFCAP",
        "--cap-add", "CAP_SYS_PTRACE", "--ro-bind", "/", "/",
        "--dev", "/dev", *devices, "--tmpfs", "/dev/shm", "--proc", "/proc", *settings, *hidden,
        "--bind", str(box.scratch), str(box.scratch), *network, "--unshare-pid", "--unshare-ipc",
        "--die-with-parent", "--new-session", "--chdir", str(box.scratch), "--",
    )  # fmt: skip


def _unshare(box: _Box) -> tuple[str, ...]:
    return own_namespaces(
        "sealed", has_network=box.has_network, scratch=box.scratch, home=box.home, has_gpu=box.has_gpu
    )


_WRAPPERS: dict[Kind, Callable[[_Box], tuple[str, ...]]] = {"bubblewrap": _bubblewrap, "unshare": _unshare}


def _gpu_devices() -> Iterator[Path]:
    """Device files of GPUs."""
    for pattern in GPU_DEVICES:
        yield from sorted(Path("/dev").glob(pattern))


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
