"""Decode attention of latent queries over the paged cache, the context split over blocks.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). Any head count, rows 1 to 8 a request, bf16 and fp8 e4m3
caches of 64-token pages, contexts to 2^31 tokens over pages anywhere (addresses are 64-bit). Refused: other
page sizes or dtypes, heads that are not contiguous in `query`.

Layout: one block works on 16 (row, head) pairs of one request and on one split of its context; two warps
have the copy engine load tiles of 32 tokens row by row into a ring of stages, and 8 warps share each
tile. Scores: warp w multiplies 8 tokens with one half of the 576 columns (queries stay in registers);
softmax: 2 pairs a warp, a token a lane; values: 64 of 512 columns a warp. Values follow a tile behind the
scores, and scores and probabilities have two buffers each, so that one barrier a tile suffices. Keys and
values of an fp8 cache become bf16 in registers, four neighbouring columns a lane. `query` [B,H,576] bf16
(token stride free), `cache` [pages,64,576] (page stride free), `block_table` int32 [R,max_pages],
`lengths` int32 [R] are read after the wait. Written: `partial` [S,B,H,512] bf16 and `partial_lse` [S,B,H]
fp32, which `mla_value` merges; with one split these are `out` and `lse` of the op's contract. With more,
`mla_attend` merges them in a second kernel when the caller gives the workspace.

Numerics: scores by mma with fp32 accumulation over 48 or 64 columns, those sums added in fp32; online softmax
in fp32 over tiles in ascending order, peaks kept unscaled, so that lse = fma(peak, scale, ln(sum)) rounds
once more only; probabilities are rounded to bf16 before they meet the values, their sum is not; fp8
values are exact in bf16 and `kv_scale` multiplies scores and results. lse is the natural logarithm.
Row t of a request of length n sees its first n - rows + 1 + t tokens; without any the row is zeros and lse
-inf. Tokens past the length never enter, whatever pages hold.

Validation: `tests/k3_decode/cute/test_mla_attend.py` compiles every variant for the three architectures and
replays the tile map in numpy; its GPU tests compare with the float64 oracle over heads, rows, lengths and
regimes. On an H200 it agreed with the oracle in 108 cells (TP1 to TP16, both caches, 1 to 8 rows), and at
1,048,576 tokens over pages scattered past 2 GiB; calls alone, back to back and in replays gave the same bits;
memcheck is clean. racecheck names the copies that refill a stage against its former readers, and nothing
else: they are ordered by the readers' arrivals at an mbarrier on which the loading warps wait. With named
barriers of the block in its place, at which every reader arrives, it names them as well, so it counts no
barrier before a bulk copy. sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.mla_partials import (
    OP_INDEX,
    WORKSPACE_BYTES,
    fake,
    fake_partials,
    merge_partials,
    split_workspace,
    splits_of,
    wide,
    workspace_bytes,
)
from k3_decode.cute.mla_tile import (
    FP8_PITCH,
    HALF_STEPS,
    LATENT,
    PAIRS,
    PITCH,
    PROBABILITY_PITCH,
    ROW,
    SCORE_PITCH,
    THREADS,
    TILE,
    WARPS,
    mixed_of,
    scores_of,
    softmax,
    spread_query,
    stage_queries,
)
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["WORKSPACE_BYTES", "mla_attend", "splits_of", "variants", "workspace_bytes"]

PAGE_SIZE = 64
STAGES, FP8_STAGES = 4, 8
"""Tiles in shared memory: one read for its values, one for its scores, the rest on their way."""
LOADERS = 2
"""Warps that load: a warp issues its lanes' bulk copies one after another, so several share a tile's tokens.
"""
COMPUTE_BARRIER = 1


@cute.kernel
def _attend(
    query: cute.Tensor,
    cache: cute.Tensor,
    block_table: cute.Tensor,
    lengths: cute.Tensor,
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    launches: cute.Tensor,
    rows: Int32,
    scale: Float32,
    value_scale: Float32,
    is_fp8: cutlass.Constexpr,
    loaders: cutlass.Constexpr,
    stages: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    pair_tile, split, request = cute.arch.block_idx()
    splits = partial.shape[0]
    lane = tid % 32
    warp = tid // 32
    quad, quarter = lane // 4, lane % 4
    heads = query.shape[1]
    pairs = rows * heads
    own_tokens = TILE // loaders
    first_pair = pair_tile * PAIRS

    row_bytes, row_pitch = (ROW, FP8_PITCH) if is_fp8 else (ROW * 2, PITCH)
    stage_bytes = TILE * row_pitch
    score_bytes, probability_bytes = 2 * PAIRS * SCORE_PITCH * 4, PAIRS * PROBABILITY_PITCH
    stages_at = cute.arch.get_dyn_smem(Uint8, 128).toint()
    work_at = stages_at + (stages - 1) * stage_bytes
    scores_at = stages_at + stages * stage_bytes
    probabilities_at = scores_at + 2 * score_bytes
    rescale_at = probabilities_at + 2 * probability_bytes
    barriers = cute.arch.alloc_smem(Int64, 2 * stages, 8)
    barriers_at = barriers.toint()
    if tid == 0:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(barriers + i, loaders)
            cute.arch.mbarrier_init(barriers + stages + i, WARPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()

    length = ins.load_activation_word(ins.byte_address(lengths) + Int64(request) * 4)
    tiles = (length + TILE - 1) // TILE
    each = (tiles + splits - 1) // splits
    first = cutlass.min(each * split, tiles)
    end = cutlass.min(first + each, tiles)

    element = 1 if is_fp8 else 2
    table_at = ins.byte_address(block_table) + Int64(request) * block_table.stride[0] * 4
    cache_at = ins.byte_address(cache)
    page_bytes = Int64(cache.stride[0]) * element
    token_bytes = Int64(cache.stride[1]) * element

    # Queries by way of the last stage into registers; their readers free it for the first time.
    half, token_group = warp // 4 % 2, warp % 4
    half_bytes = half * (row_bytes // 2)
    queries = [(Int32(0), Int32(0), Int32(0), Int32(0)) for _ in range(HALF_STEPS)]
    if warp < WARPS and first < end:
        stage_queries(query, work_at, request * rows, first_pair, pairs, heads, tid)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)
        if cutlass.const_expr(is_fp8):
            queries_at = work_at + quad * PITCH + half * ROW + quarter * 8
            queries = [spread_query(queries_at + k * 32) for k in range(HALF_STEPS)]
        else:
            queries_at = work_at + lane % 16 * PITCH + lane // 16 * 16 + half_bytes
            queries = [ins.load_matrix(queries_at + k * 32) for k in range(HALF_STEPS)]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers + (2 * stages - 1))

    score_scale = scale * frag.LOG2E
    # What a softmax lane knows of its two pairs: the last token each may see.
    own_pairs = [first_pair + warp * 2 + i for i in range(2)]
    limits = [length - rows + cutlass.min(pair // heads, rows - 1) for pair in own_pairs]
    peaks = [Float32(-Float32.inf), Float32(-Float32.inf)]
    totals = [Float32(0.0), Float32(0.0)]
    mixed = [(Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)) for _ in range(8)]
    stage = Int32(0)
    phase = Int32(0)
    keys_lane = (token_group * 8 + lane % 8) * row_pitch + half_bytes + lane // 8 * 16
    values_lane = lane * FP8_PITCH + warp * 64
    if cutlass.const_expr(not is_fp8):
        values_lane = lane % 16 * PITCH + warp * 128 + lane // 16 * 16
    score_lane = scores_at + (warp * 2 * SCORE_PITCH + lane) * 4
    score_place = scores_at + ((half * PAIRS + quad) * SCORE_PITCH + token_group * 8 + quarter * 2) * 4
    share_lane = probabilities_at + warp * 2 * PROBABILITY_PITCH + lane * 2
    weights_lane = probabilities_at + lane % 16 * PROBABILITY_PITCH + lane // 16 * 16
    old_stage = Int32(0)
    entry = cutlass.min(first, cutlass.max(tiles - 1, 0)) // (PAGE_SIZE // TILE)
    page = ins.load_activation_word(table_at + Int64(entry) * 4)
    # Each round takes in a tile (but the last) and adds the values of the one before (but the first).
    for tile in cutlass.range(first, end + Int32(first < end)):
        valid = length - tile * TILE
        stage_at = stages_at + stage * stage_bytes
        buffer = tile % 2
        if warp >= WARPS:
            # Loaders run ahead until they wait for a stage. The last was first freed by the readers of
            # queries.
            if tile < end:
                own_token = (warp - WARPS) * own_tokens + lane
                from_at = cache_at + Int64(page) * page_bytes
                from_at = from_at + Int64(tile % (PAGE_SIZE // TILE) * TILE + own_token) * token_bytes
                entry = cutlass.min(tile + 1, end - 1) // (PAGE_SIZE // TILE)
                page = ins.load_activation_word(table_at + Int64(entry) * 4)
                cute.arch.mbarrier_wait(
                    barriers + (stages + stage), phase if stage == stages - 1 else 1 - phase
                )
                taken = cutlass.max(cutlass.min(valid - (warp - WARPS) * own_tokens, own_tokens), 0)
                frag.expect_bytes_if(barriers_at + stage * 8, taken * row_bytes, Int32(lane == 0))
                cute.arch.sync_warp()
                to = stage_at + own_token * row_pitch
                frag.bulk_load_if(to, from_at, Int32(row_bytes), barriers_at + stage * 8, Int32(lane < taken))
        else:
            if tile < end:
                cute.arch.mbarrier_wait(barriers + stage, phase)
                if valid < TILE:
                    pieces = row_bytes // 16
                    for i in cutlass.range_constexpr((TILE * pieces + THREADS - 1) // THREADS):
                        piece = tid + i * THREADS
                        token = piece // pieces
                        if token >= valid and token < TILE:
                            hole = stage_at + token * row_pitch + piece % pieces * 16
                            ins.shared_store(hole, (Int32(0), Int32(0), Int32(0), Int32(0)))
                    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)
                scores = scores_of(queries, stage_at + keys_lane, is_fp8)
                spot = score_place + buffer * score_bytes
                frag.shared_store_f32x2(spot, scores[0], scores[1])
                frag.shared_store_f32x2(spot + 8 * SCORE_PITCH * 4, scores[2], scores[3])
            cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)

            if tile > first:
                old_buffer = 1 - buffer
                old_rescale = rescale_at + old_buffer * (PAIRS * 4) + quad * 4
                low, high = ins.shared_load_f32(old_rescale), ins.shared_load_f32(old_rescale + 32)
                weights = [
                    ins.load_matrix(weights_lane + old_buffer * probability_bytes + k * 32)
                    for k in range(TILE // 16)
                ]
                old_at = stages_at + old_stage * stage_bytes
                mixed = mixed_of(mixed, low, high, weights, old_at + values_lane, is_fp8)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(barriers + (stages + old_stage))
            if tile < end:
                visible = [Int32(tile * TILE + lane <= limit) for limit in limits]
                shares, rescales, peaks = softmax(
                    score_lane + buffer * score_bytes, visible, peaks, score_scale
                )
                totals = [
                    total * rescale + share
                    for total, rescale, share in zip(totals, rescales, shares, strict=True)
                ]
                share_at = share_lane + buffer * probability_bytes
                frag.shared_store_bf16(share_at, shares[0])
                frag.shared_store_bf16(share_at + PROBABILITY_PITCH, shares[1])
                if lane == 0:
                    rescale_to = rescale_at + buffer * (PAIRS * 4) + warp * 8
                    frag.shared_store_f32x2(rescale_to, rescales[0], rescales[1])
        old_stage = stage
        stage = stage + 1
        if stage == stages:
            stage = Int32(0)
            phase = 1 - phase

    if warp < WARPS:
        sums = frag.sum_lanes(totals, (16, 8, 4, 2, 1))
        token_at = Int64(request * rows)
        lse_at = ins.byte_address(partial_lse) + Int64(split) * partial_lse.stride[0] * 4
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)
        for i in cutlass.range_constexpr(2):
            if lane == 0:
                share = frag.keep_if(frag.reciprocal(sums[i]) * value_scale, Int32(sums[i] > 0.0))
                ins.shared_store_f32(rescale_at + (warp * 2 + i) * 4, share)
                if own_pairs[i] < pairs:
                    place = (token_at + Int64(own_pairs[i] // heads)) * partial_lse.stride[1]
                    place = place + Int64(own_pairs[i] % heads)
                    frag.store_f32(lse_at + place * 4, peaks[i] * scale + cute.log(sums[i]))
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)
        # An empty one of several splits leaves its latent as it was: lse -inf gives it weight 0.
        if first < end or splits == 1:
            partial_at = ins.byte_address(partial) + Int64(split) * partial.stride[0] * 2
            for i in cutlass.range_constexpr(2):
                pair = first_pair + quad + 8 * i
                scale = ins.shared_load_f32(rescale_at + (quad + 8 * i) * 4)
                to_row = partial_at + (token_at + Int64(pair // heads)) * partial.stride[1] * 2
                to_row = to_row + Int64(pair % heads * (LATENT * 2) + warp * 128)
                for n in cutlass.range_constexpr(4):
                    left, right = mixed[2 * n], mixed[2 * n + 1]
                    values = [
                        value * scale for value in (*left[2 * i : 2 * i + 2], *right[2 * i : 2 * i + 2])
                    ]
                    if cutlass.const_expr(is_fp8):
                        # Even columns left, odd ones right: a lane has four neighbours.
                        words = (ins.pack_halves(values[0], values[2]), ins.pack_halves(values[1], values[3]))
                        frag.store_pair_if(to_row + n * 32 + Int64(quarter * 8), words, Int32(pair < pairs))
                    else:
                        at = to_row + n * 32 + Int64(quarter * 4)
                        frag.store_word_if(at, ins.pack_halves(values[0], values[1]), Int32(pair < pairs))
                        frag.store_word_if(
                            at + 16, ins.pack_halves(values[2], values[3]), Int32(pair < pairs)
                        )
    if tid + pair_tile + split + request == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


@cute.jit
def _launch(
    query: cute.Tensor,
    cache: cute.Tensor,
    block_table: cute.Tensor,
    lengths: cute.Tensor,
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    launches: cute.Tensor,
    rows: Int32,
    scale: Float32,
    value_scale: Float32,
    stream: Any,
    is_fp8: cutlass.Constexpr,
    loaders: cutlass.Constexpr,
    stages: cutlass.Constexpr,
):
    pair_tiles = (rows * query.shape[1] + PAIRS - 1) // PAIRS
    _attend(
        query,
        cache,
        block_table,
        lengths,
        partial,
        partial_lse,
        launches,
        rows,
        scale,
        value_scale,
        is_fp8,
        loaders,
        stages,
    ).launch(
        grid=(pair_tiles, partial.shape[0], lengths.shape[0]),
        block=(THREADS + 32 * loaders, 1, 1),
        smem=_shared_bytes(is_fp8, stages),
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )


def _shared_bytes(is_fp8: bool, stages: int) -> int:
    tiles = stages * TILE * (FP8_PITCH if is_fp8 else PITCH)
    return tiles + 2 * (2 * PAIRS * SCORE_PITCH * 4 + PAIRS * PROBABILITY_PITCH + PAIRS * 4) + 256


@memoize
def _compile(is_fp8: bool, loaders: int, stages: int) -> Callable[..., None]:
    """The launch for one cache type; heads, rows, requests, pages, splits and strides stay symbolic."""
    tokens, heads, requests = (cute.sym_int32() for _ in range(3))
    query = fake(BFloat16, (tokens, heads, ROW), (wide(8), ROW, 1))
    kind = Uint8 if is_fp8 else BFloat16
    cache = fake(kind, (cute.sym_int32(), PAGE_SIZE, ROW), (wide(16), wide(16), 1))
    block_table = fake(Int32, (requests, cute.sym_int32()), (wide(1), 1), 4)
    lengths = fake(Int32, (requests,), (1,), 4)
    partial, partial_lse = fake_partials(cute.sym_int32(), tokens, heads)
    launches = fake(Int32, (cute.sym_int32(),), (1,), 4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, query, cache, block_table, lengths, partial, partial_lse, launches, Int32(1),
        Float32(1.0), Float32(1.0), stream, is_fp8, loaders, stages, options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


def stages_of(is_fp8: bool) -> int:
    """Tiles in shared memory: as many bytes for either cache type."""
    return FP8_STAGES if is_fp8 else STAGES


def mla_attend(
    *,
    query: "torch.Tensor",
    cache: "torch.Tensor",
    block_table: "torch.Tensor",
    lengths: "torch.Tensor",
    rows: int,
    scale: float,
    kv_scale: float,
    out: "torch.Tensor",
    lse: "torch.Tensor",
    launches: "torch.Tensor",
    workspace: "torch.Tensor | None" = None,
    loaders: int = LOADERS,
    stages: int | None = None,
) -> None:
    """Write attention and its log-sum-exp to `out` and `lse`.

    `out` [S,B,H,512] with `lse` [S,B,H] takes the context in S splits, as the shards that `mla_value` merges,
    in one launch. `out` [B,H,512] is the whole: in one launch and one split without a workspace; with one
    (uint8, at least `workspace_bytes`), in the splits that fill the device and a second launch that merges
    them. `loaders` and `stages` are for measurements.
    """
    requests, heads = lengths.shape[0], query.shape[1]
    if query.shape[0] != requests * rows:
        raise ValueError(f"mla_attend: {query.shape[0]} query rows for {requests} requests of {rows} rows")
    partial, partial_lse = (out, lse) if out.dim() == 4 else (out.unsqueeze(0), lse.unsqueeze(0))
    splits = splits_of(requests, rows, heads)
    is_merged = out.dim() == 3 and workspace is not None and splits > 1
    if is_merged and workspace is not None:
        partial, partial_lse = split_workspace(workspace, splits, query.shape[0], heads)
    is_fp8 = cache.element_size() == 1
    _compile(is_fp8, loaders, stages or stages_of(is_fp8))(
        query, _bytes_of(cache) if is_fp8 else cache, block_table, lengths, partial, partial_lse, launches,
        rows, scale * kv_scale, kv_scale,
    )  # fmt: skip
    if is_merged:
        merge_partials(partial, partial_lse, out, lse, launches)


def _bytes_of(cache: "torch.Tensor") -> "torch.Tensor":
    """An fp8 cache as bytes: not every exchange protocol knows the type, and the kernel reads bytes."""
    import torch

    return cache.view(torch.uint8)


def variants() -> tuple[Variant, ...]:
    """The attention for both cache types."""
    roles = (
        ("query", "activation"), ("cache", "activation"), ("block_table", "index"), ("lengths", "index"),
        ("partial", "output"), ("partial_lse", "output"), ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="mla_attend",
            name=f"mla_attend_{'fp8' if is_fp8 else 'bf16'}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda is_fp8=is_fp8: _compile(is_fp8, LOADERS, stages_of(is_fp8)),  # type: ignore[misc]
            parameters=roles,
            source="cute/mla_attend.py",
            is_smoke=not is_fp8,
        )
        for is_fp8 in (False, True)
    )
