"""What every fused op states about itself, so that one harness can test any of them.

Invariant: an op is called with keyword arguments only, writes into buffers that the caller owns (arguments of
role `OUTPUT`, `STATE` or `WORKSPACE`), allocates nothing, and returns `None`. So poisoning outputs, guarding
buffers, checking that inputs are untouched and capturing a CUDA graph need no knowledge of the op. The same
signature serves the stock composition (`ops/`), the CPU implementation (`cpu/`) and the CuTe DSL kernel
(`cute/`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from k3_decode.shapes import RankShapes

if TYPE_CHECKING:  # the names and roles of ops are read where there is no torch
    import torch

__all__ = ["LAUNCH_SLOTS", "OP_NAMES", "Args", "Cell", "OpSpec", "Param", "Role", "from_args"]

Args: TypeAlias = "dict[str, torch.Tensor | int | float | bool | None]"
"""Arguments of one call by name: tensors, sizes and constants."""

OP_NAMES = (
    "attn_res",
    "projection",
    "kda_step",
    "moe_front",
    "router",
    "experts",
    "situ_mlp",
    "latent_tail",
    "mla_query",
    "mla_attend",
    "mla_value",
)
"""Every fused op; an op's place is its index in the launch counters."""
LAUNCH_SLOTS = 16
"""Length of the `launches` int32 tensor that optimised ops (`cpu/`, `cute/`) take beside the arguments of
`OpSpec`.

Every kernel launch adds 1 at its op's place, on the device, by one thread with a relaxed add; an op of two
kernels adds 2.
"""


class Role(StrEnum):
    """What a parameter is to the op: the audit decides from it which loads may pass a dependency wait."""

    WEIGHT = "weight"
    """Constant while the model serves; the only role that may be read before the previous kernel is done."""
    ACTIVATION = "activation"
    """Written by an earlier kernel of the same step; read only after the wait."""
    INDEX = "index"
    """Slots, block tables, lengths: written before the step by the host or by input preparation."""
    STATE = "state"
    """Read and written in place; whatever the op does not declare as touched stays bit for bit."""
    OUTPUT = "output"
    """Written in full by every call, never read."""
    WORKSPACE = "workspace"
    """Scratch of the caller: split partials, counters. Content is undefined between calls unless the op says
    so.
    """
    SCALAR = "scalar"
    """A host number."""


@dataclass(frozen=True, slots=True)
class Param:
    """One keyword argument of an op."""

    name: str
    role: Role
    is_exact: bool = False
    """For outputs and states: equal to the oracle bit for bit (copies, indices, conv state)."""
    token_axis: int | None = 0
    """For outputs: the axis along which errors are kept per token; None where there is none."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point at which an op is tried: a rank's shapes, and how much work the step holds."""

    shapes: RankShapes
    requests: int
    """Decode requests in the step."""
    rows: int = 1
    """Rows per request: 1 in plain decode, drafts + 1 in speculative verify (at most 8)."""
    context: int = 64
    """Tokens already in the KV cache of each request, the step's own rows included."""
    kv_dtype: str = "bf16"
    """`bf16` or `fp8` (e4m3 with one scale a tensor)."""

    @property
    def tokens(self) -> int:
        """Rows in the step over all requests."""
        return self.requests * self.rows


@dataclass(frozen=True, slots=True)
class OpSpec:
    """An op: its parameters, its truth, its stock composition and the inputs it is tried on."""

    name: str
    params: tuple[Param, ...]
    regimes: tuple[str, ...]
    """Input regimes that `make_args` knows; the first is `gaussian`. Zeros are never the data."""
    make_args: "Callable[[Cell, str, torch.Generator, torch.device], Args]"
    """Fresh arguments for a cell and regime; outputs are allocated and hold NaN (or -1 for integers)."""
    oracle: "Callable[[Args], Mapping[str, torch.Tensor]]"
    """Float64 (or exact integer) truth of every `OUTPUT` and `STATE` by name; changes nothing."""
    stock: Callable[..., None]
    """Plain torch at the precisions and rounding points of the stock path; writes the outputs in place."""
    touched: "Callable[[Args], Mapping[str, torch.Tensor]] | None" = None
    """For each `STATE` parameter, a boolean mask of the elements a call may change; all others stay bit for
    bit.
    """

    def written(self) -> tuple[Param, ...]:
        """Parameters that a call may change and the oracle predicts."""
        return tuple(p for p in self.params if p.role in (Role.OUTPUT, Role.STATE))


def from_args(
    function: "Callable[..., Mapping[str, torch.Tensor]]",
) -> "Callable[[Args], Mapping[str, torch.Tensor]]":
    """A function of an op's keyword arguments, as the function of one `Args` that `OpSpec` holds."""
    return lambda args: function(**args)
