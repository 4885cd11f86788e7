"""The places in vLLM that the observer reads, by version, and whether the installed vLLM has them.

Compared with the sources as text, so that nothing is imported for it: vLLM's K3 modules need a GPU to import,
and an unknown vLLM must come up as if there were no observer.
"""

import ast
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

__all__ = ["POINTS", "Point", "missing_points", "vllm_folder", "vllm_version"]


class Point(NamedTuple):
    """A function, a method or a record: its file below vLLM's package, and what must be there."""

    file: str
    name: str
    """`function`, `Class.method` or `Class`."""
    parts: tuple[str, ...]
    """First parameters of a function; fields of a record."""


_COMMON = (
    Point("v1/worker/worker_base.py", "WorkerWrapperBase.init_device", ("self",)),
    Point("v1/worker/worker_base.py", "WorkerBase.compile_or_warm_up_model", ("self",)),
    Point(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.execute_model",
        ("self", "scheduler_output", "intermediate_tensors"),
    ),
    Point(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner._determine_batch_execution_and_padding",
        ("self", "num_tokens", "num_reqs"),
    ),
    Point(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.execute_model",
        ("self", "scheduler_output", "intermediate_tensors"),
    ),
    Point(
        "v1/worker/gpu/dp_utils.py",
        "dispatch_cg_and_sync_dp",
        ("cudagraph_manager", "num_reqs", "num_tokens"),
    ),
    Point("v1/worker/gpu/cudagraph_utils.py", "BatchExecutionDescriptor", ("cg_mode", "num_tokens")),
    Point(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
        ),
    ),
    Point("v1/core/sched/output.py", "CachedRequestData", ("req_ids", "num_output_tokens")),
)
_K3 = (
    Point(
        "models/kimi_k3/nvidia/specialized_decode/runtime/decode.py",
        "SpecializedDecode.plan",
        ("self", "positions", "intermediate_tensors"),
    ),
    Point("models/kimi_k3/nvidia/model.py", "KimiLinearForCausalLM.build_specialized_decode", ("self",)),
)
POINTS: Mapping[str, tuple[Point, ...]] = {"0.32.": _COMMON, "0.33.": (*_COMMON, *_K3)}
"""By prefix of the version. 0.32 has no specialised decode to observe."""


def vllm_version() -> str | None:
    """Version of the installed vLLM; None where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def vllm_folder() -> Path | None:
    """Folder of the installed package, found without importing it."""
    found = find_spec("vllm")
    if found is not None and found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations)))
    try:
        return Path(str(distribution("vllm").locate_file("vllm")))
    except PackageNotFoundError:
        return None


def missing_points(found: str | None, folder: Path | None) -> tuple[str, ...]:
    """What this vLLM lacks or has otherwise, in words; empty where the observer knows it."""
    if found is None or folder is None:
        return ("vLLM is not installed",)
    points = next((points for prefix, points in POINTS.items() if found.startswith(prefix)), None)
    if points is None:
        known = ", ".join(f"{prefix}x" for prefix in POINTS)
        return (f"vLLM {found} is not known to this observer; it knows {known}",)
    return tuple(words for point in points if (words := _unlike(point, folder)) is not None)


def _unlike(point: Point, folder: Path) -> str | None:
    path = folder / point.file
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError) as error:
        return f"vllm/{point.file} cannot be read ({type(error).__name__})"
    found: ast.AST | None = None
    for name in point.name.split("."):
        named = (n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
        found = next(named, None)
        if found is None:
            return f"vllm/{point.file} has no {point.name}"
        body = found.body
    parts = _parts(found)
    missing = [part for part in point.parts if part not in parts]
    return f"{point.name} in vllm/{point.file} has no {', '.join(missing)}" if missing else None


def _parts(found: ast.AST | None) -> tuple[str, ...]:
    """Parameters of a function, annotated fields of a class."""
    if isinstance(found, ast.FunctionDef):
        return tuple(a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs))
    if isinstance(found, ast.ClassDef):
        return tuple(
            n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        )
    return ()
