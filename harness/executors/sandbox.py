"""What surrounds a process that runs candidate code: no secrets, no network, limits.

The environment is an allow-list, and of that nothing whose name looks like a secret. Where the kernel lets an
ordinary user make namespaces (`unshare`), the process has its own: it sees no other process, so that the
environment of whoever started it stays closed to it as well, and no network unless it must ask a server.
What could not be had is said in `Sandbox.words`. Files of the user stay as they are: a machine that judges
strangers' code keeps none that matter (docs/ci.md), and `confinement` is for code that an agent wrote.
"""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from harness.executors.namespaces import USERS, can_run, own_namespaces

__all__ = [
    "Sandbox",
    "end_boxed",
    "ended_words",
    "limit_this_process",
    "sandboxed",
    "scrubbed",
    "wrapper_here",
]

ALLOWED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TEMP", "TMP",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS",
    "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "CUDA_CACHE_PATH", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR", "TORCH_CUDA_ARCH_LIST", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "XDG_CACHE_HOME",
    "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "COVERAGE_PROCESS_START",
})  # fmt: skip
"""Variables that a check may need, by name."""
ALLOWED_PREFIXES = ("LC_", "NVIDIA_", "NCCL_", "CUTE_DSL_", "FASTTRACK_", "TORCH_NCCL_")
SECRET = re.compile(r"(?i)token|secret|passw|key|auth|credential|cookie|private|signature")
MAX_FILE_BYTES = 256 * 2**30


class Sandbox(NamedTuple):
    """How to start a process that runs candidate code."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    words: str
    """What it lacks and what it has, for the log."""


def sandboxed(argv: Sequence[str], *, has_network: bool = False, **more: str) -> Sandbox:
    """A command in a sandbox; `more` are variables that it gets beside the allowed ones."""
    environment = scrubbed(os.environ) | more
    dropped = len(os.environ) - len(scrubbed(os.environ))
    wrapper, words = wrapper_here(has_network)
    return Sandbox((*wrapper, *argv), environment, f"{dropped} variables withheld; {words}")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process with candidate code gets."""
    return {
        name: value
        for name, value in environment.items()
        if (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not SECRET.search(name)
    }


def ended_words(code: int) -> str:
    """How a process ended, by the code that its parent saw. A shell, or the first process of a namespace,
    says 128 and the number of the signal that ended what it ran.
    """
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    try:
        return signal.Signals(number).name if number else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def end_boxed(child: "subprocess.Popen[bytes]") -> None:
    """End a process that leads its own session, with everything that it started.

    Where it has processes of its own, none of them runs any more on return: the first of them is killed, and
    the kernel lets its parent know only when all the others are gone.
    """
    words = [str(word) for word in child.args] if isinstance(child.args, list | tuple) else []
    if child.poll() is None and ("--fork" in words or words[:1] == ["bwrap"]):
        for inner in _children_of(child.pid):
            with suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _children_of(pid: int) -> tuple[int, ...]:
    try:
        return tuple(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()))
    except OSError:
        return ()  # it is gone, or this kernel does not list them: then its group is killed


@lru_cache(maxsize=2)
def wrapper_here(has_network: bool) -> tuple[tuple[str, ...], str]:
    """What to put before a command on this machine, the strongest that works, and what it gives in words."""
    network = "the network is open" if has_network else "no network"
    whole = own_namespaces("open", has_network=has_network)
    if can_run(whole, gpu_probe()):
        return whole, f"processes of its own; {network}"
    users = (*USERS, *(() if has_network else ("--net",)), "--")
    if can_run(users):
        return users, f"other processes closed to it; {network}"
    network = "the network is open"
    network += "" if has_network else ", as no network namespace can be made here"
    if can_run((*USERS, "--")):
        return (*USERS, "--"), f"other processes closed to it; {network}"
    return (), f"other processes of this user can be read; {network}"


def gpu_probe() -> tuple[str, ...]:
    """What must end well in a box: where there is an NVIDIA GPU its driver must start there."""
    if not Path("/dev/nvidiactl").exists():
        return ("true",)
    return (
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))",
    )


def limit_this_process() -> None:
    """No core dumps, no file above `MAX_FILE_BYTES`; called before candidate code is imported."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = MAX_FILE_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
