"""Attention residual and RMSNorm of one sublayer's input: softmax mix of the finished blocks and the running
prefix.

Scope: sm_90a (run), sm_100a and sm_103a (compiled); any row count; 0 to 15 blocks; `hidden` a multiple of
8 that `cluster` x 8 divides, at most 8192 columns a block. Refused: other dtypes, rows whose last axis is
not contiguous, row strides that are no multiple of 8 elements.

Layout: one cluster of `cluster` blocks a row; block r holds columns r x hidden/cluster onward, 8 columns
(16 bytes) a thread. `prefix` [B,hidden] bf16 (read, and written when there is a delta), `delta` [B,hidden]
bf16, `blocks` [B,N,hidden] bf16 (entries below `blocks_read` read, entry `write_index` written),
`score_weight` fp32 and `norm_weight` bf16 [hidden] (constant), `out` [B,hidden] bf16. Row strides are
free; base addresses are 16-byte aligned. No null slots.

Numerics: p = bf16(prefix + delta), one rounding; sums of squares and dot products in fp32, per thread over
8 columns in ascending order, then across lanes by a butterfly, then over warps and blocks in ascending
order, so a row gives the same bits at every batch size and in every run. score_i = dot_i / sqrt(mean_i +
eps); the softmax subtracts the largest score; the mix stays fp32 and is rounded once, after the norm. With
no blocks the mix is p. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_attn_res.py` compiles the smoke variant for the three architectures
and replays the reduction's lane map in numpy; its GPU tests compare with the float64 value, prefix and
blocks bit for bit, and graph replays with changed inputs. On an H200 it was compared with the oracle at 1,
2, 3, 7, 8, 16, 17, 32 and 64 rows of K3's width, in every input regime at 5 rows, and on the canary and
nano models (NOTES.md); calls alone, back to back and in replays gave the same bits; memcheck and racecheck
are clean (2, 3 and 32 rows). sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import instructions as ins
from k3_decode.cute.reduction import lane_slot, lane_sums, warp_sum
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["attn_res", "cluster_of", "slots_of", "variants"]

OP_INDEX = 0
"""Place of the op in the launch counters."""
VECTOR = 8
"""Columns a thread holds: 16 bytes of bf16."""


@cute.kernel
def _mix_rows(
    prefix: cute.Tensor,
    delta: cute.Tensor,
    blocks: cute.Tensor,
    score_weight: cute.Tensor,
    norm_weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    write_index: Int32,
    eps: Float32,
    hidden: cutlass.Constexpr,
    count: cutlass.Constexpr,
    has_delta: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    vectors = hidden // VECTOR // cluster
    warps = (vectors + 31) // 32
    row = bid // cluster
    rank = bid % cluster
    lane = tid % 32
    warp = tid // 32
    slots = slots_of(count)

    sums = cute.arch.alloc_smem(Float32, cluster * warps * slots, 16)
    squares = cute.arch.alloc_smem(Float32, cluster * warps, 16)
    barriers = cute.arch.alloc_smem(Int64, 2, 8)
    sums_at, squares_at, barriers_at = sums.toint(), squares.toint(), barriers.toint()
    if cutlass.const_expr(cluster > 1):  # noqa: SIM102 - a test at compile time, one on the device
        if tid == 0:
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + 1, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, cluster * warps * 2 * (count + 1) * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + 1, cluster * warps * 4)

    # Threads past the row's end repeat the last vector, and their sums are dropped.
    is_inside = tid < vectors
    column = rank * vectors + cutlass.min(tid, vectors - 1)
    offset = Int64(column) * (VECTOR * 2)
    prefix_at = ins.byte_address(prefix) + Int64(row) * prefix.stride[0] * 2 + offset
    blocks_at = ins.byte_address(blocks) + Int64(row) * blocks.stride[0] * 2 + offset
    block_bytes = blocks.stride[1] * 2

    weights = ()
    if cutlass.const_expr(count > 0):
        weight_at = ins.byte_address(score_weight) + Int64(column) * (VECTOR * 4)
        weights = ins.load_weight_f32(weight_at) + ins.load_weight_f32(weight_at + 16)
    norms = ins.load_weight(ins.byte_address(norm_weight) + offset)
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    new = ins.load_activation(prefix_at)
    if cutlass.const_expr(has_delta):
        added = ins.load_activation(ins.byte_address(delta) + Int64(row) * delta.stride[0] * 2 + offset)
    sources = [ins.load_activation(blocks_at + block_bytes * i) for i in range(count)]
    if cutlass.const_expr(has_delta):
        new = _add_words(new, added)
        if is_inside:
            ins.store_words(prefix_at, new)
    if is_inside and write_index >= 0:
        ins.store_words(blocks_at + block_bytes * write_index, new)
    sources.append(new)
    mine = Float32(1.0) if is_inside else Float32(0.0)

    mixed = _floats(new)
    if cutlass.const_expr(count > 0):
        values = _statistics(sources, weights, mine)
        total = lane_sums(values, lane)
        slot = lane_slot(lane, slots)
        place = ((rank * warps + warp) * slots + slot) * 4
        if lane % (32 // slots) == 0 and slot % (slots // 2) <= count:
            if cutlass.const_expr(cluster > 1):
                for peer in cutlass.range_constexpr(cluster):
                    there = ins.cluster_address(sums_at + place, Int32(peer))
                    ins.store_remote_f32(there, total, ins.cluster_address(barriers_at, Int32(peer)))
            else:
                ins.shared_store_f32(sums_at + place, total)
        if cutlass.const_expr(cluster > 1):
            cute.arch.mbarrier_wait(barriers, 0)
        else:
            cute.arch.sync_threads()
        source = cutlass.min(lane, count)
        square, dot = Float32(0.0), Float32(0.0)
        for w in cutlass.range_constexpr(cluster * warps):
            square = square + ins.shared_load_f32(sums_at + (w * slots + source) * 4)
            dot = dot + ins.shared_load_f32(sums_at + (w * slots + slots // 2 + source) * 4)
        score = dot * cute.rsqrt(square * (1.0 / hidden) + eps)
        scores = [cute.arch.shuffle_sync(score, i) for i in range(count + 1)]
        top = scores[0]
        for i in cutlass.range_constexpr(count):
            top = cute.arch.fmax(top, scores[i + 1])
        shares = [cute.exp(s - top) for s in scores]
        whole = shares[0]
        for i in cutlass.range_constexpr(count):
            whole = whole + shares[i + 1]
        scale = 1.0 / whole
        mixed = _mix([s * scale for s in shares], sources)

    square = Float32(0.0)
    for j in cutlass.range_constexpr(VECTOR):
        square = square + mixed[j] * mixed[j]
    square = warp_sum(square * mine)
    if cutlass.const_expr(cluster > 1):
        if lane < cluster:
            there = ins.cluster_address(squares_at + (rank * warps + warp) * 4, lane)
            ins.store_remote_f32(there, square, ins.cluster_address(barriers_at + 8, lane))
        cute.arch.mbarrier_wait(barriers + 1, 0)
    else:
        if lane == 0:
            ins.shared_store_f32(squares_at + warp * 4, square)
        cute.arch.sync_threads()
    square = Float32(0.0)
    for w in cutlass.range_constexpr(cluster * warps):
        square = square + ins.shared_load_f32(squares_at + w * 4)
    scale = cute.rsqrt(square * (1.0 / hidden) + eps)
    if is_inside:
        words = _scaled_words(mixed, scale, norms)
        ins.store_words(ins.byte_address(out) + Int64(row) * out.stride[0] * 2 + offset, words)
    if tid == 0 and bid == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


def _floats(words: ins.Words) -> list[Float32]:
    return [half for word in words for half in (ins.low_half(word), ins.high_half(word))]


def _add_words(left: ins.Words, right: ins.Words) -> ins.Words:
    a, b = _floats(left), _floats(right)
    sums = [x + y for x, y in zip(a, b, strict=True)]
    return tuple(ins.pack_halves(sums[i], sums[i + 1]) for i in range(0, VECTOR, 2))


def _statistics(sources: list[ins.Words], weights: tuple[Float32, ...], mine: Float32) -> list[Float32]:
    """Per source the sum of squares (first half of the places) and the score product (second half)."""
    half = slots_of(len(sources) - 1) // 2
    values = [Float32(0.0)] * (2 * half)
    for i, words in enumerate(sources):
        square, dot = Float32(0.0), Float32(0.0)
        for x, w in zip(_floats(words), weights, strict=True):
            square = square + x * x
            dot = dot + x * w
        values[i], values[half + i] = square * mine, dot * mine
    return values


def _mix(shares: list[Float32], sources: list[ins.Words]) -> list[Float32]:
    mixed = [Float32(0.0)] * VECTOR
    for share, words in zip(shares, sources, strict=True):
        mixed = [m + share * x for m, x in zip(mixed, _floats(words), strict=True)]
    return mixed


def _scaled_words(mixed: list[Float32], scale: Float32, norms: ins.Words) -> ins.Words:
    y = [m * scale * w for m, w in zip(mixed, _floats(norms), strict=True)]
    return tuple(ins.pack_halves(y[i], y[i + 1]) for i in range(0, VECTOR, 2))


@cute.jit
def _launch(
    prefix: cute.Tensor,
    delta: cute.Tensor,
    blocks: cute.Tensor,
    score_weight: cute.Tensor,
    norm_weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    write_index: Int32,
    eps: Float32,
    stream: Any,
    hidden: cutlass.Constexpr,
    count: cutlass.Constexpr,
    has_delta: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
):
    threads = (hidden // VECTOR // cluster + 31) // 32 * 32
    _mix_rows(
        prefix, delta, blocks, score_weight, norm_weight, out, launches, write_index, eps,
        hidden, count, has_delta, cluster,
    ).launch(
        grid=(prefix.shape[0] * cluster, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


@cache
def _compile(hidden: int, count: int, has_delta: bool, cluster: int) -> Callable[..., None]:
    """The launch for one width and block count; rows and strides stay symbolic."""
    rows, entries = cute.sym_int32(), cute.sym_int32()
    wide = (rows, hidden)

    def row_tensor() -> Any:
        return make_fake_tensor(BFloat16, wide, (cute.sym_int64(divisibility=8), 1), assumed_align=16)

    prefix, delta, out = row_tensor(), row_tensor(), row_tensor()
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    blocks = make_fake_tensor(BFloat16, (rows, entries, hidden), strides, assumed_align=16)
    score_weight = make_fake_tensor(Float32, (hidden,), (1,), assumed_align=16)
    norm_weight = make_fake_tensor(BFloat16, (hidden,), (1,), assumed_align=16)
    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, prefix, delta, blocks, score_weight, norm_weight, out, launches, Int32(-1), Float32(1e-5),
        stream, hidden, count, has_delta, cluster, options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


def slots_of(count: int) -> int:
    """Floats a warp publishes for `count` blocks and the prefix: a power of two, squares before products."""
    half = 1
    while half < count + 1:
        half *= 2
    return 2 * half


def cluster_of(hidden: int, rows: int) -> int:
    """Blocks a row is spread over, by measurement at K3's width: 7 of 1024 columns, at 32 rows 2."""
    if hidden % (7 * 4 * VECTOR):
        return 1
    return 2 if rows == 32 else 7


def attn_res(
    *,
    prefix: "torch.Tensor",
    delta: "torch.Tensor | None",
    blocks: "torch.Tensor",
    blocks_read: int,
    write_index: int,
    score_weight: "torch.Tensor",
    norm_weight: "torch.Tensor",
    out: "torch.Tensor",
    eps: float,
    launches: "torch.Tensor",
) -> None:
    """Update `prefix` (and `blocks[:, write_index]`) and write the normed mix to `out`, in one launch."""
    rows, hidden = prefix.shape
    if not 0 <= blocks_read <= min(15, blocks.shape[1]):
        raise ValueError(f"attn_res: blocks_read {blocks_read} is outside 0..{min(15, blocks.shape[1])}")
    launch = _compile(hidden, blocks_read, delta is not None, cluster_of(hidden, rows))
    launch(
        prefix,
        prefix if delta is None else delta,
        blocks,
        score_weight,
        norm_weight,
        out,
        launches,
        write_index,
        eps,
    )


def variants() -> tuple[Variant, ...]:
    """K3's forms (block counts, with and without delta, cluster sizes) and those of the small widths."""
    roles = (
        ("prefix", "state"), ("delta", "activation"), ("blocks", "state"), ("score_weight", "weight"),
        ("norm_weight", "weight"), ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    forms = [(7168, n, True, c) for n in range(9) for c in (7, 2)]
    forms += [(7168, n, False, c) for n in (0, 4, 8) for c in (7,)]
    forms += [(d, n, True, 1) for d in (192, 128) for n in (0, 2, 3)]
    return tuple(
        Variant(
            op="attn_res",
            name=f"attn_res_d{d}_n{n}{'' if has_delta else '_start'}_c{c}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=(d, n, has_delta, c): _compile(*form),  # type: ignore[misc]
            parameters=roles,
            source="cute/attn_res.py",
            is_smoke=(d, n, has_delta, c) == (7168, 4, True, 7),
            max_cluster=c,
        )
        for d, n, has_delta, c in forms
    )
