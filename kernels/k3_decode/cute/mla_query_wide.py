"""The MLA query for steps of more than 16 tokens a block: the same launch as `mla_query.py`, other insides.

Scope, tensors and validation are those of `mla_query.py`, which chooses. A block takes 32 or 64 tokens. They
pass through two tiles of shared memory, filled by bulk copies, as every block reads all of x and each line of
it would else go to 96 blocks from L2. Four helper warps sum the squares of an eighth of the rows, send them
to all 8 blocks (DSMEM), and store the part with position and the cache rows, a token each.

Numerics: q_weight x w_norm is rounded to bf16 once a block and multiplied with x as it is, fp32 accumulation
(mma), warps' parts added in ascending order. That sum is rounded to bf16 for W_UK (fp32 accumulation), and
the row's 1/rms is applied in fp32 after it, and to the part with position directly; then bf16. So a row's
bits are not those of a narrow step; in either they do not depend on the other rows.
"""

from collections.abc import Callable
from functools import cache as memoize
from typing import Any

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
from k3_decode.cute.row_stream import CARVEOUT

__all__ = ["launch_wide", "shared_bytes"]

HELPERS = 4
THREADS = 32 * (WARPS + HELPERS)
X_TILES = 2
"""Tiles of 16 tokens in shared memory where a block has several."""
X_GAP = 64
"""Bytes between rows of x, so that two rows' pieces of 64 bytes lie in different banks."""


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
    row_tiles: cutlass.Constexpr,
    is_fp8: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, head, group = cute.arch.block_idx()
    lane = tid % 32
    warp = tid // 32
    quad, quarter = lane // 4, lane % 4
    last_row = packed.shape[0] - 1
    first_row = group * (16 * row_tiles)
    chunks = q_lora // CHUNK
    own_chunks = (chunks + WARPS - 1) // WARPS

    shared_at = cute.arch.get_dyn_smem(Uint8, 128).toint()
    uk_at = shared_at
    nope_at = uk_at + NOPE * UK_PITCH
    sums_at = nope_at + 16 * row_tiles * NOPE_PITCH
    squares_at = sums_at + WARPS * 16 * row_tiles * OWN_ROWS * 4
    x_at = squares_at + 2 * 16 * row_tiles * 4
    x_pitch = q_lora * 2 + X_GAP
    barriers = cute.arch.alloc_smem(Int64, X_TILES, 8)

    cute.arch.cluster_arrive_relaxed()
    if tid == 0:
        for i in cutlass.range_constexpr(X_TILES):
            cute.arch.mbarrier_init(barriers + i, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    packed_at = ins.byte_address(packed)
    row_bytes = Int64(packed.stride[0]) * 2
    query_at = ins.byte_address(query)
    token_bytes = Int64(query.stride[0]) * 2
    helper = warp - WARPS
    scales = [(Int32(0), Int32(0), Int32(0), Int32(0)) for _ in range(2)]
    if warp >= WARPS:
        # Helpers: squares of two rows of every tile, each by two warps, to all blocks of the cluster.
        scales = [ins.load_weight(ins.byte_address(kv_norm) + Int64(lane * 16 + i * 512)) for i in range(2)]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        pieces = q_lora // 16
        rounds = (pieces + 31) // 32
        words = []
        for m in cutlass.range_constexpr(row_tiles):
            row = cutlass.min(first_row + m * 16 + rank * 2 + helper // 2, last_row)
            row_at = packed_at + Int64(row) * row_bytes + Int64(helper % 2 * (pieces * 16))
            words += [
                ins.load_activation(row_at + Int64(cutlass.min(lane + j * 32, pieces - 1) * 16))
                for j in range(rounds)
            ]
        squares = [Float32(0.0)] * row_tiles
        for m in cutlass.range_constexpr(row_tiles):
            for j in cutlass.range_constexpr(rounds):
                part = _square(words[m * rounds + j])
                squares[m] = squares[m] + frag.keep_if(part, Int32(lane + j * 32 < pieces))
        squares = frag.sum_lanes(squares, (16, 8, 4, 2, 1))
        cute.arch.cluster_wait()
        for m in cutlass.range_constexpr(row_tiles):
            if lane < CLUSTER:
                place = squares_at + ((helper % 2 * row_tiles + m) * 16 + rank * 2 + helper // 2) * 4
                frag.store_remote_f32(ins.cluster_address(place, lane), squares[m])
        cute.arch.cluster_arrive()
    else:
        # Weights before the wait. As the other branch, so that no path of the compiled code waits in neither.
        begin_uk_copies(uk_weight, head, rank, tid, uk_at)
        chunk_of = [cutlass.min(warp + i * WARPS, chunks - 1) for i in range(own_chunks)]
        has_chunk = [Int32(warp + i * WARPS < chunks) for i in range(own_chunks)]
        columns = [chunk * (CHUNK * 2) + quarter * 16 for chunk in chunk_of]
        weight_row = head * HEAD_ROWS + rank * OWN_ROWS + quad
        weights_at = ins.byte_address(q_weight) + Int64(weight_row) * (q_lora * 2)
        raw = [
            [ins.load_weight(weights_at + (n * 8 * q_lora * 2) + Int64(column)) for n in range(3)]
            for column in columns
        ]
        norms = [ins.load_weight(ins.byte_address(q_norm) + Int64(column)) for column in columns]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        own_row = warp * 2 + lane
        for m in cutlass.range_constexpr(X_TILES):
            taken = cutlass.max(cutlass.min(last_row + 1 - first_row - m * 16, 16), 0)
            source = packed_at + Int64(cutlass.min(first_row + m * 16 + own_row, last_row)) * row_bytes
            to = x_at + (m * 16 + own_row) * x_pitch
            _fill(source, to, q_lora * 2, taken, barriers.toint() + m * 8, warp, lane)
        # The norm's weight is folded into those of q while x is on its way.
        weights = [[_weighted(words, norms[i], has_chunk[i]) for words in raw[i]] for i in range(own_chunks)]
        for m in cutlass.range_constexpr(row_tiles):
            tile_at = x_at + (m % X_TILES * 16 + quad) * x_pitch
            cute.arch.mbarrier_wait(barriers + m % X_TILES, m // X_TILES % 2)
            low_words = [ins.shared_load(tile_at + column) for column in columns]
            high_words = [ins.shared_load(tile_at + 8 * x_pitch + column) for column in columns]
            sums = [(Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))] * 3
            for i in cutlass.range_constexpr(own_chunks):
                low, high = low_words[i], high_words[i]
                for n in cutlass.range_constexpr(3):
                    b = weights[i][n]
                    sums[n] = ins.mma_bf16((low[0], high[0], low[1], high[1]), (b[0], b[1]), sums[n])
                    sums[n] = ins.mma_bf16((low[2], high[2], low[3], high[3]), (b[2], b[3]), sums[n])
            place = (warp * row_tiles + m) * 16 + quad
            for n in cutlass.range_constexpr(3):
                at = sums_at + (place * OWN_ROWS + n * 8 + quarter * 2) * 4
                frag.shared_store_f32x2(at, sums[n][0], sums[n][1])
                frag.shared_store_f32x2(at + 8 * OWN_ROWS * 4, sums[n][2], sums[n][3])
            if cutlass.const_expr(m + X_TILES < row_tiles):
                cute.arch.barrier(barrier_id=MAIN_BARRIER, number_of_threads=32 * WARPS)
                ahead = m + X_TILES
                taken = cutlass.max(cutlass.min(last_row + 1 - first_row - ahead * 16, 16), 0)
                source = (
                    packed_at + Int64(cutlass.min(first_row + ahead * 16 + own_row, last_row)) * row_bytes
                )
                to = x_at + (m % X_TILES * 16 + own_row) * x_pitch
                _fill(source, to, q_lora * 2, taken, barriers.toint() + m % X_TILES * 8, warp, lane)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier(barrier_id=MAIN_BARRIER, number_of_threads=32 * WARPS)
        cute.arch.cluster_wait()

        # Eight neighbouring columns of a row an item, to every block of the cluster; those past 128 wait for
        # their scale.
        parts = OWN_ROWS // 8
        items = 16 * row_tiles * parts
        for i in cutlass.range_constexpr((items + 32 * WARPS - 1) // (32 * WARPS)):
            item = tid + i * (32 * WARPS)
            row, column = item // parts, item % parts * 8
            if item < items and rank * OWN_ROWS + column < NOPE:
                nope_words = bf16_words(_sums_of(sums_at, row, column, row_tiles))
                there = nope_at + row * NOPE_PITCH + (rank * OWN_ROWS + column) * 2
                for peer in cutlass.range_constexpr(CLUSTER):
                    frag.store_remote_words(ins.cluster_address(there, Int32(peer)), nope_words)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        uk_words = [
            frag.load_matrix_transposed(uk_at + (k * 32 + lane) * UK_PITCH + warp * 16)
            for k in range(NOPE // 32)
        ]
        for m in cutlass.range_constexpr(row_tiles):
            latents = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
            for k in cutlass.range_constexpr(NOPE // 16):
                a = ins.load_matrix(nope_at + (m * 16 + lane % 16) * NOPE_PITCH + k * 32 + lane // 16 * 16)
                b = uk_words[k // 2]
                latents = ins.mma_bf16(a, (b[k % 2 * 2], b[k % 2 * 2 + 1]), latents)
            column = head * (LATENT + ROPE) + rank * OWN_COLUMNS + warp * 8 + quarter * 2
            for half in cutlass.range_constexpr(2):
                row = first_row + m * 16 + half * 8 + quad
                scale = _scale(squares_at + (m * 16 + half * 8 + quad) * 4, row_tiles, q_lora, eps)
                word = ins.pack_halves(latents[2 * half] * scale, latents[2 * half + 1] * scale)
                latent_at = query_at + Int64(row) * token_bytes + Int64(column) * 2
                frag.store_word_if(latent_at, word, Int32(row <= last_row))
    if warp >= WARPS:
        # Helpers write cache rows, a token each, and the columns with position once all squares are there.
        heads = uk_weight.shape[0]
        end = cutlass.min(first_row + 16 * row_tiles, last_row + 1)
        own_first = first_row + (helper * heads + head) * CLUSTER + rank
        for token in cutlass.range(own_first, end, heads * (CLUSTER * HELPERS)):
            store_cache_row(
                packed_at + Int64(token) * row_bytes + (q_lora * 2),
                ins.byte_address(slot_mapping) + Int64(token) * 8, scales, cache, inverse_scale, eps, lane,
                is_fp8,
            )  # fmt: skip
        if tid - 32 * WARPS + rank + head + group == 0:
            ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)
        cute.arch.cluster_wait()
        rope_parts = OWN_ROWS // 8
        rope_items = 16 * row_tiles * rope_parts
        for i in cutlass.range_constexpr((rope_items + 32 * HELPERS - 1) // (32 * HELPERS)):
            item = tid - 32 * WARPS + i * (32 * HELPERS)
            rope_row, rope_column = item // rope_parts, item % rope_parts * 8 + rank * OWN_ROWS
            if item < rope_items and rope_column >= NOPE and first_row + rope_row <= last_row:
                factor = _scale(squares_at + rope_row * 4, row_tiles, q_lora, eps)
                sums = _sums_of(sums_at, rope_row, rope_column - rank * OWN_ROWS, row_tiles)
                rope = bf16_words([value * factor for value in sums])
                to_column = head * (LATENT + ROPE) + LATENT - NOPE + rope_column
                to_at = query_at + Int64(first_row + rope_row) * token_bytes + Int64(to_column) * 2
                ins.store_words(to_at, rope)


def _fill(
    source: Int64, to: Int32, size: int, taken: Int32, barrier_at: Int32, warp: Int32, lane: Int32
) -> None:
    """Two lanes of each main warp start the copies of their rows among a tile's first `taken` rows of x."""
    frag.expect_bytes_if(barrier_at, taken * size, Int32(warp == 0) * Int32(lane == 0))
    frag.bulk_load_if(to, source, Int32(size), barrier_at, Int32(lane < 2) * Int32(warp * 2 + lane < taken))


def _sums_of(sums_at: Int32, row: Int32, column: Int32, row_tiles: int) -> list[Float32]:
    """Eight neighbouring columns of a row of q before its scale, from the warps' parts."""
    sums = [Float32(0.0)] * 8
    for w in range(WARPS):
        at = sums_at + ((w * (16 * row_tiles) + row) * OWN_ROWS + column) * 4
        parts = [*frag.shared_load_f32x4(at), *frag.shared_load_f32x4(at + 16)]
        sums = [s + part for s, part in zip(sums, parts, strict=True)]
    return sums


def _scale(square_at: Int32, row_tiles: int, q_lora: int, eps: Float32) -> Float32:
    """1/rms of a row from the squares of its two halves."""
    square = ins.shared_load_f32(square_at) + ins.shared_load_f32(square_at + 16 * row_tiles * 4)
    return cute.rsqrt(square * (1.0 / q_lora) + eps)


def _square(words: ins.Words) -> Float32:
    values = floats(words)
    even, odd = values[0] * values[0], values[1] * values[1]
    for i in range(2, 8, 2):
        even, odd = even + values[i] * values[i], odd + values[i + 1] * values[i + 1]
    return even + odd


def _weighted(words: ins.Words, norms: ins.Words, is_kept: Int32) -> ins.Words:
    """bf16(w norm) of 8 columns; zeros for a chunk that this warp does not own."""
    products = [x * w for x, w in zip(floats(words), floats(norms), strict=True)]
    kept = [frag.mask_word(word, is_kept) for word in bf16_words(products)]
    return (kept[0], kept[1], kept[2], kept[3])


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
    row_tiles: cutlass.Constexpr,
    is_fp8: cutlass.Constexpr,
):
    groups = (packed.shape[0] + 16 * row_tiles - 1) // (16 * row_tiles)
    _query(
        packed, q_norm, kv_norm, q_weight, uk_weight, cache, slot_mapping, query, launches,
        inverse_scale, eps, q_lora, row_tiles, is_fp8,
    ).launch(
        grid=(CLUSTER, uk_weight.shape[0], groups),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        smem=shared_bytes(q_lora, row_tiles),
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )  # fmt: skip


def shared_bytes(q_lora: int, row_tiles: int) -> int:
    rows = 16 * row_tiles
    tiles = X_TILES * 16 * (q_lora * 2 + X_GAP)
    return NOPE * UK_PITCH + rows * NOPE_PITCH + WARPS * rows * OWN_ROWS * 4 + 2 * rows * 4 + tiles + 128


@memoize
def launch_wide(q_lora: int, row_tiles: int, is_fp8: bool) -> Callable[..., None]:
    """The launch of 16 x `row_tiles` tokens a block, 2 or 4; heads, tokens and pages stay symbolic."""
    compiled: Callable[..., None] = cute.compile(
        _launch, *fakes_of(q_lora, is_fp8), q_lora, row_tiles, is_fp8, options="--enable-tvm-ffi"
    )
    return compiled
