"""What surrounds a process that runs candidate code: no secrets, no network, limits.

The environment is an allow-list, and of that nothing whose name looks like a secret. Where the kernel lets an
ordinary user make a network namespace (`unshare`), the process has one of its own with nothing in it; where
not, `Sandbox.words` says so. Files of the user stay readable: a machine that judges strangers' code keeps
none that matter (docs/ci.md).
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Sandbox", "limit_this_process", "sandboxed", "scrubbed"]

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
NAMESPACE = ("unshare", "--user", "--map-current-user", "--net", "--")


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
    if has_network:
        return Sandbox(tuple(argv), environment, f"{dropped} variables withheld; the network is open")
    if not can_cut_network():
        words = "the network is open, as no network namespace can be made here"
        return Sandbox(tuple(argv), environment, f"{dropped} variables withheld; {words}")
    return Sandbox((*NAMESPACE, *argv), environment, f"{dropped} variables withheld; no network")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process with candidate code gets."""
    return {
        name: value
        for name, value in environment.items()
        if (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not SECRET.search(name)
    }


@lru_cache(maxsize=1)
def can_cut_network() -> bool:
    """Whether a process can have a network namespace of its own here."""
    if sys.platform != "linux" or shutil.which(NAMESPACE[0]) is None:
        return False
    try:
        done = subprocess.run((*NAMESPACE, "true"), capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def limit_this_process() -> None:
    """No core dumps, no file above `MAX_FILE_BYTES`; called before candidate code is imported."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = MAX_FILE_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
