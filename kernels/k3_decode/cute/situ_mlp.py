"""A gated MLP with SiTU in two launches: layer 0's dense FFN, and a shared expert that no other op holds.

Scope: sm_90a (run; above 16 tokens by warpgroups), sm_100a and sm_103a (compiled; mma.sync throughout); 1
to 64 rows of x; `hidden` and `inter` multiples of 32. Refused: more than 64 rows, strides that are no
multiple of 8.

Layout: `x` and `out` [B,D] bf16, row strides free, every element of `out` written. `prepare` interleaves the
gate and up rows once at load (gate 0, up 0, gate 1, ...), so that a finished pair of rows is one hidden
value; `down` stays as it is. `workspace` holds the hidden rows (bf16 [B,S]). 16-byte aligned bases. No null
slots.

Numerics: bf16 products summed in fp32 by the matrix unit along a slice of K, slices added in ascending
order in fp32; SiTU in fp32 on unrounded sums, hidden values rounded to bf16 as stock does, the output
rounded once. The order depends on the plans alone. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_situ_mlp.py` compiles the smoke variant for the three architectures
and runs both traced products on an emulated grid in numpy; its GPU tests compare cells with the float64
oracle. On an H200: TP 1, 4, 8 and 16, dense and shared, 1 to 64 rows, hostile regimes, the small models;
calls alone, back to back and in replays gave the same bits; memcheck and racecheck are clean. sm_100a and
sm_103a were never run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute import ring, row_product
from k3_decode.cute.plans import has_warpgroups, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Finished
from k3_decode.cute.variant import Variant
from k3_decode.shapes import CANARY, K3, NANO

if TYPE_CHECKING:
    import torch

__all__ = ["PreparedMlp", "compile_plan", "prepare", "situ_mlp", "variants", "workspace_bytes"]

OP_INDEX = 6
"""Place of the op in the launch counters."""


@cute.kernel
def _product(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    plan: cutlass.Constexpr,
    has_gate: cutlass.Constexpr,
):
    segments = [(ins.byte_address(weight), weight.shape[0])]
    counter = ins.byte_address(launches) + OP_INDEX * 4
    row_product.multiply(plan, segments, x, _store_to(out, has_gate), counter)


def _store_to(out: cute.Tensor, has_gate: bool) -> Callable[[Finished], None]:
    """What writes a finished pair: SiTU of gate and up, or two neighbouring columns."""
    base, stride = ins.byte_address(out), out.stride[0]

    def store(pair: Finished) -> None:
        at = base + Int64(pair.token) * stride * 2
        if has_gate:
            ins.store_half_if(at + Int64(pair.row), ring.situ(pair.low, pair.high), pair.is_wanted)
        else:
            ins.store_word_if(at + Int64(pair.row) * 2, ins.pack_halves(pair.low, pair.high), pair.is_wanted)

    return store


@cute.jit
def _launch(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
    plan: cutlass.Constexpr,
    has_gate: cutlass.Constexpr,
):
    _product(x, weight, out, launches, plan, has_gate).launch(
        **row_product.launch_of(plan, weight.shape[0], stream)
    )


@cache
def compile_plan(plan: Plan, has_gate: bool) -> Callable[..., None]:
    """The launch for one plan; token count, weight rows and strides stay symbolic."""
    tokens, rows, columns = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, plan.k),
        row_product.matrix_of(rows, plan.k),
        row_product.rows_of(tokens, columns if has_gate else rows),
        row_product.vector_of(cute.sym_int32(), Int32),
        row_product.stream_of(),
        plan,
        has_gate,
        options="--enable-tvm-ffi",
    )
    return compiled


@dataclass(frozen=True, slots=True)
class PreparedMlp:
    """One MLP's weights in the kernel's order."""

    gate_up: "torch.Tensor"
    """[2S, D]: gate and up rows by turns."""
    down: "torch.Tensor"


def prepare(*, gate_up_weight: "torch.Tensor", down_weight: "torch.Tensor") -> PreparedMlp:
    """Interleave one MLP's gate and up rows; for load time."""
    hidden, inter = down_weight.shape
    turns = gate_up_weight.view(2, inter, hidden).transpose(0, 1).reshape(2 * inter, hidden)
    return PreparedMlp(turns.contiguous(), down_weight)


def workspace_bytes(*, inter: int, tokens: int = 64) -> int:
    """Size of the uint8 `workspace` that `situ_mlp` needs; layers may share it."""
    return tokens * inter * 2


def situ_mlp(
    *,
    x: "torch.Tensor",
    prepared: PreparedMlp,
    workspace: "torch.Tensor",
    out: "torch.Tensor",
    launches: "torch.Tensor",
) -> None:
    """Write `down(SiTU(gate(x), up(x)))` to `out`, in two launches; raises `ValueError` outside the scope."""
    import torch

    tokens, (width, inter) = x.shape[0], prepared.down.shape
    if not 1 <= tokens <= 64:
        raise ValueError(f"situ_mlp: {tokens} rows of x are outside 1..64; split the step")
    is_grouped = has_warpgroups()
    up = compile_plan(plan_for(2 * inter, width, tokens, is_grouped), True)
    down = compile_plan(plan_for(width, inter, tokens, is_grouped), False)
    hidden = workspace[: tokens * inter * 2].view(torch.bfloat16).view(tokens, inter)
    up(x, prepared.gate_up, hidden, launches)
    down(hidden, prepared.down, out, launches)


def variants() -> tuple[Variant, ...]:
    """K3's dense FFN and shared expert at TP 1 to 16, and the small models', at each token capacity."""
    ranks = [K3.rank(tp) for tp in (8, 16, 1, 2, 4)] + [m.rank(tp) for m in (CANARY, NANO) for tp in (1, 2)]
    sizes = [(rank.model.hidden, inter) for rank in ranks for inter in (rank.shared_inter, rank.dense_inter)]
    ups = plans_by_architecture(tuple((2 * inter, hidden) for hidden, inter in sizes))
    downs = plans_by_architecture(tuple(sizes))
    forms = [(*form, True) for form in ups] + [(*form, False) for form in downs]
    roles = (("x", "activation"), ("weight", "weight"), ("out", "output"), ("launches", "workspace"))
    return tuple(
        Variant(
            op="situ_mlp",
            name=f"situ_mlp_{'up' if has_gate else 'down'}_{plan.name}",
            architectures=architectures,
            compile=lambda plan=plan, has_gate=has_gate: compile_plan(plan, has_gate),  # type: ignore[misc]
            parameters=roles,
            source="cute/situ_mlp.py",
            is_smoke=has_gate and plan == plan_for(1536, 7168, 8, True),
            max_cluster=plan.cluster,
        )
        for plan, architectures, has_gate in forms
    )
