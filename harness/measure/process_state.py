"""What of this process a candidate could leave changed: flags, environment, random state, patched modules,
threads.

`snapshot` gives named digests; two snapshots that differ in a name mean that something was left behind under
that name. Names of environment variables are kept, values only as digests, so that a secret never reaches a
sample.
"""

import hashlib
import os
import random
import sys
import threading
from types import FunctionType, ModuleType

import torch

__all__ = ["changed_names", "snapshot"]

WATCHED_MODULES = (
    "torch",
    "torch.nn.functional",
    "torch.cuda",
    "time",
    "harness.measure.tensors",
    "harness.engines.in_process",
)
"""Modules whose functions a candidate must not replace: the timer's, the checker's and the framework's."""


def snapshot() -> dict[str, str]:
    """Digest by name of everything watched."""
    state = {f"env:{key}": _digest(value) for key, value in os.environ.items()}
    state.update(_torch_flags())
    state["rng:python"] = _digest(repr(random.getstate()))
    state["rng:torch"] = _digest(torch.get_rng_state().numpy().tobytes().hex())
    state["threads"] = ",".join(sorted(t.name for t in threading.enumerate() if not t.daemon))
    state["import_hooks"] = _digest(repr([type(f).__name__ for f in sys.meta_path]))
    for name in WATCHED_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            state.update(_functions(name, module))
    return state


def changed_names(before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    """Names whose digest differs, appeared or vanished, sorted."""
    return tuple(sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k)))


def _torch_flags() -> dict[str, str]:
    flags = {
        "default_dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal_seen": float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) != 0.0,
        "cuda_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "reduced_bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }
    return {f"torch:{name}": str(value) for name, value in flags.items()}


def _functions(name: str, module: ModuleType) -> dict[str, str]:
    """Identity of every function of a module; enough to see one replaced within a process."""
    return {
        f"module:{name}.{key}": f"{id(value)}:{id(value.__code__) if isinstance(value, FunctionType) else 0}"
        for key, value in sorted(vars(module).items())
        if callable(value) and not key.startswith("__")
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
