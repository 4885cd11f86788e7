"""The places in vLLM that the plugin touches or reads, and what each must look like.

Everything that is known of vLLM's inside stands here. `missing_points` compares it with the installed
version, so that an unknown vLLM is left alone instead of half changed.
"""

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

__all__ = ["KNOWN_VERSIONS", "MODEL_MODULE", "POINTS", "Point", "missing_points", "vllm_version"]

KNOWN_VERSIONS = ("0.33.",)
"""Prefixes of versions whose points were read and run."""
MODEL_MODULE = "vllm.models.kimi_k3.nvidia.model"


class Point(NamedTuple):
    """A function or method: where it is, and the parameters that callers pass."""

    module: str
    name: str
    """Dotted below the module."""
    parameters: tuple[str, ...]
    use: str
    """`replaced`, `wrapped` or `read`."""


POINTS = (
    Point(MODEL_MODULE, "specialized_decode_config", ("vllm_config",), "wrapped"),
    Point(MODEL_MODULE, "KimiLinearForCausalLM.build_specialized_decode", ("self",), "wrapped"),
    Point(
        MODEL_MODULE,
        "KimiLinearForCausalLM.forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
        "read",
    ),
    Point(
        "vllm.models.kimi_k3.nvidia.model_state",
        "KimiK3ModelState.initialize_kv_cache",
        ("self", "kv_cache_config", "block_tables"),
        "read",
    ),
    Point("vllm.models.kimi_k3.nvidia.specialized_decode.runtime", "unsupported", ("vllm_config",), "read"),
    Point(
        "vllm.model_executor.layers.quantization.mxfp4",
        "Mxfp4MoEMethod.process_weights_after_loading",
        ("self", "layer"),
        "wrapped",
    ),
    Point("vllm.forward_context", "get_forward_context", (), "read"),
)


def vllm_version() -> str | None:
    """Version of the installed vLLM; None where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def missing_points(find: Callable[[str], Any] = importlib.import_module) -> tuple[str, ...]:
    """What the installed vLLM lacks or has otherwise, in words; empty where every point is as expected."""
    found = vllm_version()
    if found is None or not found.startswith(KNOWN_VERSIONS):
        known = ", ".join(f"{prefix}x" for prefix in KNOWN_VERSIONS)
        return (f"vLLM {found or 'is not installed'}: only {known} is known here",)
    return tuple(words for point in POINTS if (words := _unlike(point, find)) is not None)


def _unlike(point: Point, find: Callable[[str], Any]) -> str | None:
    try:
        target = find(point.module)
        for name in point.name.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        return f"{point.module}.{point.name} is not there ({error})"
    given = tuple(inspect.signature(target).parameters)
    if given[: len(point.parameters)] != point.parameters:
        return f"{point.module}.{point.name} takes {given}, and {point.parameters} are expected"
    return None
