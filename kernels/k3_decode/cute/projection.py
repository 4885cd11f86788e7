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
on the canary and nano models (NOTES.md). Not run: compute-sanitizer, and anything on sm_100a and sm_103a.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import instructions as ins
from k3_decode.cute import row_gemm, row_plan, row_stream, row_sums
from k3_decode.cute.plans import CAPACITIES, has_warpgroups, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Finished
from k3_decode.cute.variant import Variant
from k3_decode.shapes import CANARY, K3, NANO

if TYPE_CHECKING:
    import torch

__all__ = ["projection", "variants"]

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
    place = row_plan.locate(plan)
    if cutlass.const_expr(plan.cluster > 1):
        row_sums.arm_barrier(plan, place, x.shape[0], False)
    segments = [(ins.byte_address(weight), plan.rows)]
    store = _store_to(out, is_fp32)
    if cutlass.const_expr(plan.is_grouped):
        tiles = row_gemm.Tiles(plan, place, segments, x)
        products = cute.make_rmem_tensor((plan.tokens // 2,), Float32)
        products.fill(0.0)
        row_gemm.start(plan, tiles)
        for stage in cutlass.range(tiles.count, unroll=1):
            row_gemm.advance(plan, tiles, stage, products, None, None, is_chained=not is_fp32)
        row_gemm.publish(plan, place, tiles, products, None)
        row_sums.finish_published(plan, place, False, x.shape[0], None, store)
    else:
        chain = CHAIN_STEPS if is_fp32 else None
        sums, _ = row_stream.stream(plan, place, segments, x, chain=chain)
        row_sums.finish(plan, place, sums, None, x.shape[0], None, store)
    if place.is_first:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


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
        grid=(plan.groups * plan.cluster, 1, 1),
        block=(plan.threads, 1, 1),
        cluster=(plan.cluster, 1, 1),
        smem=row_plan.shared_layout(plan).size,
        min_blocks_per_mp=plan.blocks_per_sm,
        preferred_smem_carveout=row_plan.CARVEOUT,
        stream=stream,
        use_pdl=True,
    )


@cache
def compile_plan(plan: Plan, is_fp32: bool) -> Callable[..., None]:
    """The launch for one plan; the token count and strides stay symbolic."""
    tokens = cute.sym_int32()
    x = make_fake_tensor(BFloat16, (tokens, plan.k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
    weight = make_fake_tensor(BFloat16, (plan.rows, plan.k), (plan.k, 1), assumed_align=16)
    kind = Float32 if is_fp32 else BFloat16
    out = make_fake_tensor(kind, (tokens, plan.rows), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, x, weight, out, launches, stream, plan, is_fp32, options="--enable-tvm-ffi"
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
            (rank.model.vocab // rank.tp, rank.model.hidden),
        )
    )
    forms = [(form, False) for shape in shapes for form in plans_by_architecture(*shape)]
    heads = ((20480, 7168), (320, 192), (320, 128))
    forms += [(form, True) for shape in heads for form in plans_by_architecture(*shape, CAPACITIES[:1])]
    roles = (("x", "activation"), ("weight", "weight"), ("out", "output"), ("launches", "workspace"))
    return tuple(
        Variant(
            op="projection",
            name=f"projection_{plan.name}{'_fp32' if is_fp32 else ''}",
            architectures=architectures,
            compile=lambda plan=plan, is_fp32=is_fp32: compile_plan(plan, is_fp32),  # type: ignore[misc]
            parameters=roles,
            source="cute/projection.py",
            is_smoke=(plan.rows, plan.k, plan.tokens) == (7168, 1536, 8),
            max_cluster=plan.cluster,
        )
        for (plan, architectures), is_fp32 in forms
    )
