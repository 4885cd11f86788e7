"""What the pack says of one compiled kernel, so that it can be compiled and audited without a GPU.

A variant is one set of compile-time constants of one kernel. Invariant: describing variants imports neither
torch nor cutlass; only `Variant.compile` does, in a process whose `CUTE_DSL_ARCH` was set before.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["DISPATCHED", "COMPILED", "Variant"]

DISPATCHED = ("sm_90a",)
"""Architectures on which the kernels run and are measured."""
COMPILED = ("sm_100a", "sm_103a")
"""Architectures for which the kernels are compiled and audited only."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel at one set of constants."""

    op: str
    """Name of the fused op it belongs to, as in `ops/`."""
    name: str
    """Unique in the pack, letters, digits and underscores: op and constants, such as `attn_res_d7168_c7`."""
    architectures: tuple[str, ...]
    compile: Callable[[], object]
    """Compiles with fake tensors for the process's architecture and returns what `cute.compile` gave."""
    parameters: tuple[tuple[str, str], ...]
    """The kernel's tensor parameters in order, each with its role (`ops.contract.Role` value)."""
    source: str
    """Path of the kernel's module within the package, such as `cute/attn_res.py`."""
    is_smoke: bool = False
    """Whether it stands for its op in the smoke set (one variant an op)."""
    max_cluster: int = 1
    """Largest thread-block cluster it is launched with."""
    expected: tuple[tuple[str, int], ...] = ()
    """Committed expectation: `spill_bytes`, `max_registers`, `max_shared_bytes`; empty until measured."""
