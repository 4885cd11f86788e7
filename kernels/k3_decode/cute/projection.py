"""Dense projection of a decode step: `out = x @ weight.T`, every weight byte read once.

Scope: sm_90a (run; above 16 tokens by warpgroups), sm_100a and sm_103a (compiled; mma.sync throughout); 1
to 64 rows of x; K a multiple of 32, any even row count M; bf16 operands, bf16 or fp32 output. Serves KDA's
packed input projection, MLA's, both output projections, the language-model head, and the same of the small
models. Refused: more than 64 rows, odd M, strides that are no multiple of 8.

Layout: `x` [B,K] bf16, row stride free, written by the previous kernel; `weight` [M,K] bf16, contiguous,
constant; `out` [B,M] bf16 or fp32, row stride free, every element written. 16-byte aligned bases. No null
slots.

Numerics: bf16 products summed in fp32 by the matrix unit along a slice of K, slices added in ascending
order in fp32, one rounding to the output type. The order depends on the plan (shape and token capacity),
not on timing, so equal calls give equal bits; a row may differ in the last bit between capacities 8, 16,
32 and 64. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_projection.py` compiles the smoke variant for the three
architectures and runs the traced functions of every kind of plan on an emulated grid in numpy; its GPU
tests compare with the float64 product and count compilations. On an H200 it was compared with the oracle
at 1, 2, 3, 7, 8, 16, 17, 32 and 64 rows of the TP8 and TP16 shards, in every input regime at 5 rows, and
on the canary and nano models (NOTES.md); after the plans changed at 1, 7, 16, 17, 32 and 64 rows of TP1, 4,
8 and 16. Calls alone, back to back and in replays gave the same bits; memcheck and racecheck are clean (2,
3, 12 and 40 rows). sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute import row_product
from k3_decode.cute.plans import has_warpgroups, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Finished
from k3_decode.cute.variant import Variant
from k3_decode.shapes import CANARY, K3, NANO

if TYPE_CHECKING:
    import torch

__all__ = ["compile_plan", "projection", "variants"]

OP_INDEX = 1
"""Place of the op in the launch counters."""
CHAIN_STEPS = 4
"""Steps of K that the matrix unit sums before its result is added in fp32, where the output is fp32."""


@cute.kernel
def _project(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    plan: cutlass.Constexpr,
    is_fp32: cutlass.Constexpr,
):
    segments = [(ins.byte_address(weight), weight.shape[0])]
    counter = ins.byte_address(launches) + OP_INDEX * 4
    chain = CHAIN_STEPS if is_fp32 else None
    row_product.multiply(plan, segments, x, _store_to(out, is_fp32), counter, chain=chain)


def _store_to(out: cute.Tensor, is_fp32: bool) -> Callable[[Finished], None]:
    """What writes a finished pair to `out`."""
    base, stride = ins.byte_address(out), out.stride[0]

    def store(pair: Finished) -> None:
        index = Int64(pair.token) * stride + Int64(pair.row)
        if is_fp32:
            ins.store_f32_pair_if(base + index * 4, pair.low, pair.high, pair.is_wanted)
        else:
            ins.store_word_if(base + index * 2, ins.pack_halves(pair.low, pair.high), pair.is_wanted)

    return store


@cute.jit
def _launch(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
    plan: cutlass.Constexpr,
    is_fp32: cutlass.Constexpr,
):
    _project(x, weight, out, launches, plan, is_fp32).launch(
        **row_product.launch_of(plan, weight.shape[0], stream)
    )


@cache
def compile_plan(plan: Plan, is_fp32: bool) -> Callable[..., None]:
    """The launch for one plan; token count, weight rows and strides stay symbolic."""
    tokens, rows = cute.sym_int32(), cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, plan.k),
        row_product.matrix_of(rows, plan.k),
        row_product.rows_of(tokens, rows, Float32 if is_fp32 else BFloat16),
        row_product.vector_of(cute.sym_int32(), Int32),
        row_product.stream_of(),
        plan,
        is_fp32,
        options="--enable-tvm-ffi",
    )
    return compiled


def projection(
    *, x: "torch.Tensor", weight: "torch.Tensor", out: "torch.Tensor", launches: "torch.Tensor"
) -> None:
    """Write `x @ weight.T` to `out` in one launch on this stream; raises `ValueError` outside the scope."""
    tokens, (rows, k) = x.shape[0], weight.shape
    if not 1 <= tokens <= 64 or rows % 2:
        raise ValueError(
            f"projection: {tokens} rows of x outside 1..64, or {rows} weight rows no even number"
        )
    plan = plan_for(rows, k, tokens, has_warpgroups())
    compile_plan(plan, out.element_size() == 4)(x, weight, out, launches)


def variants() -> tuple[Variant, ...]:
    """The projections of K3 at every tensor-parallel size and of the small models, at each token capacity."""
    ranks = [K3.rank(tp) for tp in (8, 16, 1, 2, 4)] + [
        CANARY.rank(1),
        CANARY.rank(2),
        NANO.rank(1),
        NANO.rank(2),
    ]
    shapes = dict.fromkeys(
        shape
        for rank in ranks
        for shape in (
            (rank.kda_in_rows, rank.model.hidden),
            (rank.mla_in_rows, rank.model.hidden),
            (rank.model.hidden, rank.channels),
        )
    )
    heads = dict.fromkeys((rank.model.vocab // rank.tp, rank.model.hidden) for rank in ranks)
    forms = [(*form, False) for form in plans_by_architecture(tuple(shapes))]
    forms += [(*form, True) for form in plans_by_architecture(tuple(heads))]
    roles = (("x", "activation"), ("weight", "weight"), ("out", "output"), ("launches", "workspace"))
    return tuple(
        Variant(
            op="projection",
            name=f"projection_{plan.name}{'_fp32' if is_fp32 else ''}",
            architectures=architectures,
            compile=lambda plan=plan, is_fp32=is_fp32: compile_plan(plan, is_fp32),  # type: ignore[misc]
            parameters=roles,
            source="cute/projection.py",
            is_smoke=(plan.k, plan.tokens) == (1536, 8),
            max_cluster=plan.cluster,
        )
        for plan, architectures, is_fp32 in forms
    )
