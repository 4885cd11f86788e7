"""One launch of a skinny product: what `projection`, `moe_front`, `latent_tail` and `situ_mlp` share.

Those modules own their tensors, their roles and what becomes of a finished pair of sums; this one runs the
body of the kernel over `row_stream` or `row_gemm`, whichever the plan says, and states how it is launched.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import instructions as ins
from k3_decode.cute import row_gemm, row_plan, row_stream, row_sums
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Extent

__all__ = [
    "blocks_of",
    "copies_of",
    "launch_of",
    "matrix_of",
    "multiply",
    "rows_of",
    "stream_of",
    "vector_of",
]


@cute.jit
def multiply(
    plan: Any,
    segments: Any,
    x: Any,
    store: Any,
    counter: Any,
    norm_weight: Any = None,
    eps: Any = None,
    chain: Any = None,
):
    """The kernel's body: products of `x` with the rows of `segments`, each finished pair handed to `store`.

    `counter`: device address of the op's launch counter. `norm_weight` and `eps`: the rows of x are normed
    first. `chain`: steps of K that the matrix unit sums before its result is added in fp32; None: all.
    """
    place = row_plan.locate(plan)
    has_norm = norm_weight is not None
    if cutlass.const_expr(plan.cluster > 1):
        row_sums.arm_barrier(plan, place, x.shape[0], has_norm)
    extent = Extent(x.shape[0], row_plan.row_count(segments))
    if cutlass.const_expr(plan.is_grouped):
        tiles = row_gemm.Tiles(plan, place, segments, x)
        products = cute.make_rmem_tensor((plan.tokens // 2,), Float32)
        products.fill(0.0)
        squares = None
        if cutlass.const_expr(has_norm):
            squares = cute.make_rmem_tensor((len(tiles.tokens),), Float32)
            squares.fill(0.0)
        earlier = products
        if cutlass.const_expr(chain is not None):
            earlier = cute.make_rmem_tensor((plan.tokens // 2,), Float32)
            earlier.fill(0.0)
        row_gemm.start(plan, tiles)
        for stage in cutlass.range(tiles.count, unroll=1):
            row_gemm.advance(plan, tiles, stage, products, squares, norm_weight, is_chained=chain is None)
            if cutlass.const_expr(chain is not None):
                row_gemm.carry_runs(plan, stage, products, earlier)
        if cutlass.const_expr(chain is not None):
            row_gemm.carry(plan, products, earlier)
            products = earlier
        _let_next_start(plan)
        row_gemm.publish(plan, place, tiles, products, squares)
        row_sums.finish_published(plan, place, has_norm, extent, eps, store)
    else:
        stream = row_stream.Stream(plan, place, segments, x, norm_weight, chain)
        if cutlass.const_expr(stream.turns > 0):
            kept = row_stream.keep(stream)
            for _ in cutlass.range(stream.turns, unroll=1):
                row_stream.turn(stream, kept)
            row_stream.resume(stream, kept)
        stream.run(stream.turns * stream.period, plan.steps)
        sums, totals = stream.finished()
        _let_next_start(plan)
        row_sums.finish(plan, place, sums, totals if has_norm else None, extent, eps, store)
    if place.is_first:
        ins.add_launch(counter)


def _let_next_start(plan: Plan) -> None:
    """After the products, where the plan did not before them."""
    if plan.is_late:
        cute.arch.griddepcontrol_launch_dependents()


def blocks_of(plan: Plan, rows: Any) -> Any:
    """Blocks of the grid for so many weight rows."""
    return (rows + (plan.group_rows - 1)) // plan.group_rows * plan.cluster


def launch_of(plan: Plan, rows: Any, stream: Any) -> dict[str, Any]:
    """How the kernel is launched, but for its arguments."""
    return {
        "grid": (blocks_of(plan, rows), 1, 1),
        "block": (plan.threads, 1, 1),
        "cluster": (plan.cluster, 1, 1),
        "smem": row_plan.shared_layout(plan).size,
        "min_blocks_per_mp": plan.blocks_per_sm,
        "preferred_smem_carveout": row_plan.CARVEOUT,
        "stream": stream,
        "use_pdl": True,
    }


def rows_of(count: Any, width: Any, kind: Any = BFloat16, stride_of: int = 8, copies: int = 1) -> Any:
    """A fake tensor [count, width] whose row stride is free but for being a multiple of `stride_of`.

    With `copies` above 1 it is [copies, count, width].
    """
    align = min(16, stride_of * kind.width // 8)
    shape: tuple[Any, ...] = (count, width)
    stride: tuple[Any, ...] = (cute.sym_int64(divisibility=stride_of), 1)
    if copies > 1:
        shape, stride = (copies, *shape), (cute.sym_int64(divisibility=stride_of), *stride)
    return make_fake_tensor(kind, shape, stride, assumed_align=align)


def copies_of(out: Any, copies: int) -> list[tuple[Any, Any]]:
    """(device address, row stride) of every copy of an output: [B, M], or with several [copies, B, M]."""
    base = ins.byte_address(out)
    if copies == 1:
        return [(base, out.stride[0])]
    size = out.element_type.width // 8
    return [(base + Int64(copy) * out.stride[0] * size, out.stride[1]) for copy in range(copies)]


def matrix_of(rows: Any, k: int) -> Any:
    """A fake weight [rows, k], bf16 and contiguous."""
    return make_fake_tensor(BFloat16, (rows, k), (k, 1), assumed_align=16)


def vector_of(size: Any, kind: Any = BFloat16) -> Any:
    """A fake vector, 16-byte aligned; of int32, the launch counters."""
    return make_fake_tensor(kind, (size,), (1,), assumed_align=16 if kind is not Int32 else 4)


def stream_of() -> Any:
    """The caller's stream."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
