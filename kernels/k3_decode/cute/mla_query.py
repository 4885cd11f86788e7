"""MLA's query in the latent space in one kernel: q_a norm, q_b, absorbed W_UK, and this step's rows into the
paged cache.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). Any head count and token count; `q_lora` a multiple of
32; bf16 and fp8 e4m3 caches. Refused: a full-rank query (Kimi-Linear), row strides of `packed` that are no
multiple of 8 elements.

Layout: a cluster of 8 blocks a head, and 16 tokens a block; steps that take more a block run
`mla_query_wide.py`, which is faster from 17 tokens on and slower below. Block r multiplies rows r x 24 onward
of the head's 192 rows of `q_weight` [192H, q_lora], sends the part without position to all 8 (DSMEM), then
multiplies columns r x 64 onward of `uk_weight` [H, 128, 512]. Both weights are on their way before the wait,
q_weight in registers (each of 8 warps holds every 8th chunk of 32 of K), uk_weight in shared memory. `packed`
[B, mla_in_rows] bf16 (q_a, latent 512, k_pe 64, ...), `q_norm` [q_lora] and `kv_norm` [512] bf16,
`slot_mapping` int64 [B]; written: `query` [B, H, 576] bf16 (token stride free) and row `slot` of `cache`
[pages, 64, 576], by a ninth warp, one token a block. A slot below 0 stores nothing.

Numerics: x w_norm is rounded to bf16, multiplied with fp32 accumulation (mma), warps' parts are added in
ascending order, and the row's 1/rms is applied in fp32 after the product; then bf16, W_UK with fp32
accumulation, bf16. The cache row is RMSNorm in fp32 rounded once: to bf16, or to e4m3 of value x (1 /
kv_scale), saturating. k_pe is copied (bf16) or converted (fp8). A row's bits do not depend on the other rows.
NaN and infinities propagate within their row.

Validation: `tests/k3_decode/cute/test_mla_query.py` compiles every variant for the three architectures and
replays the fragment maps in numpy; its GPU tests compare query and cache with the float64 oracle over heads,
batches and regimes. On an H200 all of that, and the wider kernel once more after its branches changed: 16 to
64 rows of TP4, 8 and 16 and 17 of TP2, plain and of several rows a request, both caches, every regime but
special rows at 17 and 48. Calls of 1 to 64 rows alone, back to back and in replays gave the same bits, and
in layers at TP1 to 16; memcheck and racecheck are clean, both kernels and caches. sm_100a and sm_103a were
never run.
"""

from collections.abc import Callable
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.mla_query_rows import (
    CHUNK,
    CLUSTER,
    HEAD_ROWS,
    LATENT,
    MAIN_BARRIER,
    NOPE,
    NOPE_PITCH,
    OP_INDEX,
    OWN_COLUMNS,
    OWN_ROWS,
    ROPE,
    UK_PITCH,
    WARPS,
    begin_uk_copies,
    bf16_words,
    fakes_of,
    floats,
    store_cache_row,
)
from k3_decode.cute.mla_query_wide import launch_wide
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["mla_query", "row_tiles_of", "variants"]

MULTIPROCESSORS = 132
"""Of an H200; a choice of shapes only, any device runs any."""
THREADS = 32 * (WARPS + 1)
SHARED_BYTES = NOPE * UK_PITCH + 16 * NOPE_PITCH + WARPS * 16 * (OWN_ROWS + 1) * 4 + 128


@cute.kernel
def _query(
    packed: cute.Tensor,
    q_norm: cute.Tensor,
    kv_norm: cute.Tensor,
    q_weight: cute.Tensor,
    uk_weight: cute.Tensor,
    cache: cute.Tensor,
    slot_mapping: cute.Tensor,
    query: cute.Tensor,
    launches: cute.Tensor,
    inverse_scale: Float32,
    eps: Float32,
    q_lora: cutlass.Constexpr,
    is_fp8: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, head, group = cute.arch.block_idx()
    lane = tid % 32
    warp = tid // 32
    quad, quarter = lane // 4, lane % 4
    last_row = packed.shape[0] - 1
    first_row = group * 16
    chunks = q_lora // CHUNK
    own_chunks = (chunks + WARPS - 1) // WARPS

    shared_at = cute.arch.get_dyn_smem(Uint8, 128).toint()
    uk_at = shared_at
    nope_at = uk_at + NOPE * UK_PITCH
    sums_at = nope_at + 16 * NOPE_PITCH
    squares_at = sums_at + WARPS * 16 * OWN_ROWS * 4

    cute.arch.cluster_arrive_relaxed()
    packed_at = ins.byte_address(packed)
    row_bytes = Int64(packed.stride[0]) * 2
    if warp < WARPS:
        # Weights before the wait.
        begin_uk_copies(uk_weight, head, rank, tid, uk_at)
        chunk_of = [cutlass.min(warp + i * WARPS, chunks - 1) for i in range(own_chunks)]
        has_chunk = [Int32(warp + i * WARPS < chunks) for i in range(own_chunks)]
        columns = [Int64(chunk * (CHUNK * 2) + quarter * 16) for chunk in chunk_of]
        weight_row = head * HEAD_ROWS + rank * OWN_ROWS + quad
        weights_at = ins.byte_address(q_weight) + Int64(weight_row) * (q_lora * 2)
        weights = [
            [ins.load_weight(weights_at + (n * 8 * q_lora * 2) + column) for n in range(3)]
            for column in columns
        ]
        norms = [ins.load_weight(ins.byte_address(q_norm) + column) for column in columns]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        low_row = cutlass.min(first_row + quad, last_row)
        high_row = cutlass.min(first_row + 8 + quad, last_row)
        low_at = packed_at + Int64(low_row) * row_bytes
        high_at = packed_at + Int64(high_row) * row_bytes
        low_words = [ins.load_activation(low_at + column) for column in columns]
        high_words = [ins.load_activation(high_at + column) for column in columns]
        sums = [(Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))] * 3
        low_square, high_square = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(own_chunks):
            low, square = _weighted(low_words[i], norms[i], has_chunk[i])
            low_square = low_square + square
            high, square = _weighted(high_words[i], norms[i], has_chunk[i])
            high_square = high_square + square
            for n in cutlass.range_constexpr(3):
                b = weights[i][n]
                sums[n] = ins.mma_bf16((low[0], high[0], low[1], high[1]), (b[0], b[1]), sums[n])
                sums[n] = ins.mma_bf16((low[2], high[2], low[3], high[3]), (b[2], b[3]), sums[n])
        squares = frag.sum_lanes([low_square, high_square], (2, 1))
        place = warp * 16 + quad
        for n in cutlass.range_constexpr(3):
            at = sums_at + (place * OWN_ROWS + n * 8 + quarter * 2) * 4
            frag.shared_store_f32x2(at, sums[n][0], sums[n][1])
            frag.shared_store_f32x2(at + 8 * OWN_ROWS * 4, sums[n][2], sums[n][3])
        if quarter == 0:
            ins.shared_store_f32(squares_at + place * 4, squares[0])
            ins.shared_store_f32(squares_at + (place + 8) * 4, squares[1])
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier(barrier_id=MAIN_BARRIER, number_of_threads=32 * WARPS)
        cute.arch.cluster_wait()

        # Two neighbouring columns of a row an item: to every block of the cluster, or, past 128, to the
        # query.
        query_at = ins.byte_address(query)
        token_bytes = Int64(query.stride[0]) * 2
        pairs = OWN_ROWS // 2
        rounds = (16 * pairs + 32 * WARPS - 1) // (32 * WARPS)
        for i in cutlass.range_constexpr(rounds):
            item = tid + i * (32 * WARPS)
            row, pair = item // pairs, item % pairs
            if item < 16 * pairs and first_row + row <= last_row:
                word = _normed_pair(sums_at, squares_at, row, pair, q_lora, eps)
                column = rank * OWN_ROWS + pair * 2
                if column < NOPE:
                    there = nope_at + row * NOPE_PITCH + column * 2
                    for peer in cutlass.range_constexpr(CLUSTER):
                        frag.store_remote_word(ins.cluster_address(there, Int32(peer)), word)
                else:
                    rope_at = query_at + Int64(first_row + row) * token_bytes
                    ins.store_word(rope_at + Int64(head * (LATENT + ROPE) + LATENT - NOPE + column) * 2, word)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        uk_words = [
            frag.load_matrix_transposed(uk_at + (k * 32 + lane) * UK_PITCH + warp * 16)
            for k in range(NOPE // 32)
        ]
        latents = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for k in cutlass.range_constexpr(NOPE // 16):
            a = ins.load_matrix(nope_at + lane % 16 * NOPE_PITCH + k * 32 + lane // 16 * 16)
            b = uk_words[k // 2]
            latents = ins.mma_bf16(a, (b[k % 2 * 2], b[k % 2 * 2 + 1]), latents)
        column = head * (LATENT + ROPE) + rank * OWN_COLUMNS + warp * 8 + quarter * 2
        for half in cutlass.range_constexpr(2):
            row = first_row + half * 8 + quad
            word = ins.pack_halves(latents[2 * half], latents[2 * half + 1])
            latent_at = query_at + Int64(row) * token_bytes + Int64(column) * 2
            frag.store_word_if(latent_at, word, Int32(row <= last_row))
    else:
        # One warp writes cache rows: token rank + 8 head of the group, then every (8 heads)th.
        scales = [ins.load_weight(ins.byte_address(kv_norm) + Int64(lane * 16 + i * 512)) for i in range(2)]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        heads = uk_weight.shape[0]
        end = cutlass.min(first_row + 16, last_row + 1)
        for token in cutlass.range(first_row + head * CLUSTER + rank, end, heads * CLUSTER):
            store_cache_row(
                packed_at + Int64(token) * row_bytes + (q_lora * 2),
                ins.byte_address(slot_mapping) + Int64(token) * 8, scales, cache, inverse_scale, eps, lane,
                is_fp8,
            )  # fmt: skip
        if lane + rank + head + group == 0:
            ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)
        cute.arch.cluster_wait()


def _normed_pair(
    sums_at: Int32, squares_at: Int32, row: Int32, pair: Int32, q_lora: int, eps: Float32
) -> Int32:
    """Two neighbouring columns of a row of q, from the warps' parts."""
    square, left, right = Float32(0.0), Float32(0.0), Float32(0.0)
    for w in range(WARPS):
        place = w * 16 + row
        square = square + ins.shared_load_f32(squares_at + place * 4)
        parts = frag.shared_load_f32x2(sums_at + (place * OWN_ROWS + pair * 2) * 4)
        left, right = left + parts[0], right + parts[1]
    scale = cute.rsqrt(square * (1.0 / q_lora) + eps)
    return ins.pack_halves(left * scale, right * scale)


def _weighted(words: ins.Words, norms: ins.Words, is_kept: Int32) -> tuple[ins.Words, Float32]:
    """bf16(x w) of 8 columns and the sum of x^2; zeros for a chunk that this warp does not own."""
    kept = [frag.mask_word(word, is_kept) for word in words]
    values = floats(kept)  # type: ignore[arg-type]
    square = values[0] * values[0]
    for value in values[1:]:
        square = square + value * value
    products = [x * w for x, w in zip(values, floats(norms), strict=True)]
    return bf16_words(products), square


@cute.jit
def _launch(
    packed: cute.Tensor,
    q_norm: cute.Tensor,
    kv_norm: cute.Tensor,
    q_weight: cute.Tensor,
    uk_weight: cute.Tensor,
    cache: cute.Tensor,
    slot_mapping: cute.Tensor,
    query: cute.Tensor,
    launches: cute.Tensor,
    inverse_scale: Float32,
    eps: Float32,
    stream: Any,
    q_lora: cutlass.Constexpr,
    is_fp8: cutlass.Constexpr,
):
    groups = (packed.shape[0] + 15) // 16
    _query(
        packed, q_norm, kv_norm, q_weight, uk_weight, cache, slot_mapping, query, launches,
        inverse_scale, eps, q_lora, is_fp8,
    ).launch(
        grid=(CLUSTER, uk_weight.shape[0], groups),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        smem=SHARED_BYTES,
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )  # fmt: skip


@memoize
def _compile(q_lora: int, is_fp8: bool) -> Callable[..., None]:
    """The launch for one rank of the query; heads, tokens and pages stay symbolic."""
    compiled: Callable[..., None] = cute.compile(
        _launch, *fakes_of(q_lora, is_fp8), q_lora, is_fp8, options="--enable-tvm-ffi"
    )
    return compiled


def row_tiles_of(tokens: int, heads: int) -> int:
    """Tiles of 16 tokens that a block holds: of 1, 2 and 4 the fewest whose blocks fit the device at once."""
    groups = max(1, MULTIPROCESSORS // (CLUSTER * heads))
    needed = -(-tokens // (16 * groups))
    return 1 if needed <= 1 else 2 if needed == 2 else 4


def _launch_of(q_lora: int, row_tiles: int, is_fp8: bool) -> Callable[..., None]:
    return _compile(q_lora, is_fp8) if row_tiles == 1 else launch_wide(q_lora, row_tiles, is_fp8)


def _bytes_of(cache: "torch.Tensor") -> "torch.Tensor":
    """An fp8 cache as bytes: not every exchange protocol knows the type, and the kernel writes bytes."""
    import torch

    return cache.view(torch.uint8)


def mla_query(
    *,
    packed: "torch.Tensor",
    q_norm: "torch.Tensor",
    kv_norm: "torch.Tensor",
    q_weight: "torch.Tensor",
    uk_weight: "torch.Tensor",
    cache: "torch.Tensor",
    slot_mapping: "torch.Tensor",
    query: "torch.Tensor",
    kv_scale: float,
    eps: float,
    launches: "torch.Tensor",
    row_tiles: int | None = None,
) -> None:
    """Write `query` and the cache rows of the step's tokens, in one launch.

    `row_tiles` overrides the choice of `row_tiles_of` (for measurements).
    """
    is_fp8 = cache.element_size() == 1
    tiles = row_tiles or row_tiles_of(packed.shape[0], uk_weight.shape[0])
    _launch_of(q_norm.shape[0], tiles, is_fp8)(
        packed, q_norm, kv_norm, q_weight, uk_weight, _bytes_of(cache) if is_fp8 else cache, slot_mapping,
        query, launches, 1.0 / kv_scale if is_fp8 else 1.0, eps,
    )  # fmt: skip


def variants() -> tuple[Variant, ...]:
    """K3's rank and the small models', for each row count class and cache type."""
    roles = (
        ("packed", "activation"), ("q_norm", "weight"), ("kv_norm", "weight"), ("q_weight", "weight"),
        ("uk_weight", "weight"), ("cache", "state"), ("slot_mapping", "index"), ("query", "output"),
        ("launches", "workspace"),
    )  # fmt: skip
    forms = [(1536, tiles, is_fp8) for tiles in (1, 2, 4) for is_fp8 in (False, True)]
    forms += [(128, 1, False), (64, 1, False)]
    return tuple(
        Variant(
            op="mla_query",
            name=f"mla_query_k{q_lora}_m{tiles}_{'fp8' if is_fp8 else 'bf16'}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=(q_lora, tiles, is_fp8): _launch_of(*form),  # type: ignore[misc]
            parameters=roles,
            source="cute/mla_query.py" if tiles == 1 else "cute/mla_query_wide.py",
            is_smoke=(q_lora, tiles, is_fp8) == (1536, 1, False),
            max_cluster=CLUSTER,
        )
        for q_lora, tiles, is_fp8 in forms
    )
