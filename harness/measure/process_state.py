"""What of this process a candidate could leave changed: flags, environment, random state, the default stream,
hooks, patched modules and classes, threads.

`snapshot` gives named digests; two snapshots that differ in a name mean that something was left behind under
that name. Names of environment variables are kept, values only as digests, so that a secret never reaches a
sample. A deep snapshot also holds every function of every loaded module outside `pack_root`; of those only a
replacement counts, as importing more is no change.
"""

import atexit
import gc
import hashlib
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from harness.measure.driver import persisting_l2_bytes

__all__ = ["changed_names", "replaced_names", "snapshot"]

WATCHED_MODULES = (
    "builtins",
    "random",
    "time",
    "torch",
    "torch.nn.functional",
    "torch.cuda",
    "harness.measure.tensors",
    "harness.measure.trial",
    "harness.measure.spoil",
    "harness.measure.spread",
    "harness.measure.replays",
    "harness.measure.interleaved",
    "harness.measure.kernel_trace",
    "harness.engines.in_process",
    "harness.engines.ledger",
)
"""Modules whose functions a candidate must neither replace nor add to: the timer's, the checker's and the
framework's."""
WATCHED_CLASSES = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    torch.cuda.Event,
    torch.cuda.Stream,
    torch.cuda.CUDAGraph,
)
REPLACED = "elsewhere:"
"""Begins names of which only a replacement counts."""
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_buffer_registration_hooks",
)


def snapshot(pack_root: Path | None = None) -> dict[str, str]:
    """Digest by name of everything watched; deep where the pack's folder is given."""
    state = {f"env:{key}": _digest(value) for key, value in os.environ.items()}
    state.update(_torch_flags())
    state.update(_hooks())
    state.update(_random_states())
    state["threads"] = ",".join(sorted(t.name for t in threading.enumerate() if not t.daemon))
    state["folder"] = _digest(str(Path.cwd()))
    state["import_path"] = _digest(repr(sys.path))
    for name in WATCHED_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            state.update(_functions(f"module:{name}", module))
    for kind in WATCHED_CLASSES:
        state.update(_functions(f"class:{kind.__module__}.{kind.__name__}", kind))
    if torch.cuda.is_available():
        state.update(_device_state())
    if pack_root is not None:
        state.update(_everything_outside(pack_root))
    return state


def changed_names(before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    """Names whose digest differs, appeared or vanished, sorted."""
    names = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    return tuple(k for k in names if not k.startswith(REPLACED) or (k in before and k in after))


def replaced_names(before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    """What of the framework, the checker and the device was replaced between two snapshots: names that both
    have, so that what an import adds is none.
    """
    kinds = ("module:", "class:", "torch:", "device:", "hook:profile", "hook:function", "hook:dispatch")
    return tuple(k for k in sorted(before) if k.startswith(kinds) and after.get(k, before[k]) != before[k])


def _torch_flags() -> dict[str, str]:
    backends: Any = torch.backends
    flags = {
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal_seen": float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) != 0.0,
        "cuda_tf32": backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": backends.cudnn.allow_tf32,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "cudnn_deterministic": backends.cudnn.deterministic,
        "reduced_bf16": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "reduced_fp16": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "flash_sdp": backends.cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": backends.cuda.mem_efficient_sdp_enabled(),
        "math_sdp": backends.cuda.math_sdp_enabled(),
    }
    return {f"torch:{name}": str(value) for name, value in flags.items()}


def _hooks() -> dict[str, str]:
    """What runs unasked: on imports, calls, signals, exit, and around modules and operators."""
    from torch.nn.modules import module

    found = {f"hook:{name.strip('_')}": str(len(getattr(module, name, ()))) for name in GLOBAL_HOOKS}
    found["hook:dispatch_modes"] = str(torch._C._len_torch_dispatch_stack())  # no public name
    found["hook:function_modes"] = str(torch._C._len_torch_function_stack())  # no public name
    found["hook:import"] = _digest(repr([type(finder).__name__ for finder in sys.meta_path]))
    found["hook:profile"] = str(sys.getprofile())
    found["hook:exit"] = str(atexit._ncallbacks())  # no public name
    found["hook:uncaught"] = str(id(sys.excepthook))
    found["hook:gc"] = f"{gc.isenabled()} {gc.get_threshold()} {len(gc.callbacks)}"
    root = logging.getLogger()
    found["hook:logging"] = f"{root.level} {len(root.handlers)} {logging.root.manager.disable}"
    if threading.current_thread() is threading.main_thread():
        found["hook:signals"] = _digest(repr([signal.getsignal(s) for s in signal.valid_signals()]))
    return found


def _random_states() -> dict[str, str]:
    found = {
        "rng:python": _digest(repr(random.getstate())),
        "rng:torch": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["rng:numpy"] = _digest(repr(numpy.random.get_state()))
    return found


def _device_state() -> dict[str, str]:
    stream = torch.cuda.current_stream()
    state = torch.cuda.get_rng_state()
    return {
        "device:default_stream": str(stream.cuda_stream),
        "device:current": str(torch.cuda.current_device()),
        "device:persisting_l2": str(persisting_l2_bytes()),
        "rng:cuda": hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16],
    }


def _functions(name: str, owner: ModuleType | type) -> dict[str, str]:
    """Identity of every function of a module or class; enough to see one replaced within a process."""
    return {
        f"{name}.{key}": f"{id(value)}:{id(value.__code__) if isinstance(value, FunctionType) else 0}"
        for key, value in vars(owner).copy().items()
        if callable(value) and not (key.startswith("__") and isinstance(owner, ModuleType))
    }


def _everything_outside(pack_root: Path) -> dict[str, str]:
    """Functions of all modules that are no part of the pack, by code object where they have one."""
    return {
        f"{REPLACED}{name}.{key}": str(identity)
        for name, module in _modules_outside(pack_root)
        for key, value in vars(module).copy().items()
        if (identity := _identity(value)) is not None
    }


def _identity(value: object) -> int | None:
    """By type and not by `isinstance`, which wakes lazy objects of other people's modules."""
    if type(value) is FunctionType:
        return id(value.__code__)
    return id(value) if issubclass(type(value), type) else None


def _modules_outside(pack_root: Path) -> Iterator[tuple[str, ModuleType]]:
    root = str(pack_root.resolve()) + os.sep
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and not (file or "").startswith(root) and name != "__main__":
            yield name, module


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
