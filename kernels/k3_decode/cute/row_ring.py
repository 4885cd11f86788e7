"""Skinny products for up to 8 tokens whose weights stream through shared memory by bulk copies.

The sibling of `row_stream` where one wave of blocks shall read a large matrix without a pause: registers hold
what `row_stream` has in flight, so a multiprocessor drains between two blocks and the next kernel finds no
room; here a loading warp keeps `depth` stages on their way from before the wait on the previous kernel to the
last row, and the registers hold x.

A block owns `rows_each` rows, taken in tiles of 16; a stage is a tile's piece of K, one copy a row. The
`k_warps` computing warps divide each piece, so that a warp's K elements lie `piece_bytes` apart. A lane's
operands are 16 bytes of a row, the same of the row 8 below, and the same of a token, K renumbered as in
`row_stream`; here rows are the A operand, as x stays in registers as it was loaded only as B. Rows lie
`row_pitch` apart, an odd multiple of 64 bytes, so that eight lanes hit every bank once. x is read once, after
the wait, and serves all tiles. Sums run along K in two sets of registers by turns, then over the warps in
ascending order: the result depends on the plan alone.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute import ring, row_stream
from k3_decode.cute.row_plan import (
    RING_TILE,
    STEP,
    Place,
    Plan,
    Segments,
    row_addresses,
    row_count,
    shared_layout,
)

__all__ = [
    "load_piece",
    "load_tokens",
    "multiply_piece",
    "publish",
    "publish_square",
    "request",
    "scaled",
    "stream",
]

Pair = list[tuple[Float32, ...]]
"""Two accumulators of a tile, used by turns."""


@cute.jit
def stream(plan: Any, place: Any, segments: Any, x: Any, norm_weight: Any, chain: Any):
    """Products of the block's rows, left in shared memory as `row_sums.finish_published` takes them.

    Lets the next kernel start at once, then waits for the previous one before the first activation is read.
    `chain`: steps that the matrix unit sums before its result is added in fp32; None: a tile's half of K.
    """
    if place.tid == 0:
        _make_barriers(plan, place)
    cute.arch.sync_threads()
    if cutlass.const_expr(not plan.is_late):
        cute.arch.griddepcontrol_launch_dependents()
    rows = ins.at_most(row_count(segments) - place.first_row, Int32(plan.group_rows))
    tiles = (rows + (RING_TILE - 1)) // RING_TILE
    stages = tiles * plan.pieces
    ahead = ins.at_most(stages, Int32(plan.depth))
    if place.row_warp == 1:
        for stage in cutlass.range(ahead, unroll=1):
            request(plan, place, segments, stage, rows)
    cute.arch.griddepcontrol_wait()
    if place.row_warp == 1:
        for stage in cutlass.range(ahead, stages, unroll=1):
            ring.wait(_emptied(plan, place, stage), (stage // plan.depth - 1) & 1)
            request(plan, place, segments, stage, rows)
    else:
        words = load_tokens(plan, place, x)
        if cutlass.const_expr(norm_weight is not None):
            words, square = scaled(plan, place, words, norm_weight)
            publish_square(plan, place, square)
        for tile in cutlass.range(tiles, unroll=1):
            sums, total = _zero(), None
            for piece in cutlass.range_constexpr(plan.pieces):
                stage = tile * plan.pieces + piece
                ring.wait(_filled(plan, place, stage), (stage // plan.depth) & 1)
                loaded = load_piece(plan, place, stage)
                cute.arch.sync_warp()
                _arrive_if(_emptied(plan, place, stage), Int32(place.lane == 0))
                sums, total = multiply_piece(plan, loaded, words, piece, sums, total, chain)
            publish(plan, place, tile, sums, total)


def request(plan: Plan, place: Place, segments: Segments, stage: Any, rows: Any) -> None:
    """One warp: ask for a stage, a row's piece a lane. `rows`: of the block."""
    tile, piece = stage // plan.pieces, stage % plan.pieces
    here = ins.at_most(rows - tile * RING_TILE, Int32(RING_TILE))
    bar = _filled(plan, place, stage)
    _expect_if(bar, here * plan.piece_bytes, Int32(place.lane == 0))
    row = place.first_row + tile * RING_TILE + ins.at_most(place.lane, here - 1)
    address = row_addresses(plan, [row], segments)[0] + Int64(piece) * plan.piece_bytes
    to = _stage_at(plan, place, stage) + place.lane * plan.row_pitch
    frag.bulk_load_if(to, address, Int32(plan.piece_bytes), bar, Int32(place.lane < here))


def load_tokens(plan: Plan, place: Place, x: cute.Tensor) -> list[ins.Words]:
    """The warp's parts of x, for every step of K that it takes."""
    token = ins.at_most(place.group, x.shape[0] - 1)
    at = ins.byte_address(x) + Int64(token) * x.stride[0] * 2 + _column(plan, place)
    return [ins.load_activation(at + offset) for offset in _offsets(plan)]


def scaled(
    plan: Plan, place: Place, words: list[ins.Words], norm_weight: cute.Tensor
) -> tuple[list[ins.Words], Float32]:
    """The warp's parts of x times the norm's weight, rounded to bf16, and the lane's sum of their squares."""
    at = ins.byte_address(norm_weight) + Int64(_column(plan, place))
    norms = [ins.load_weight(at + offset) for offset in _offsets(plan)]
    square, result = Float32(0.0), []
    for token, norm in zip(words, norms, strict=True):
        product, square = row_stream.scale_tokens(token, row_stream.floats_of(norm), square)
        result.append(product)
    return result, square


def publish_square(plan: Plan, place: Place, square: Float32) -> None:
    """Write the warp's sums of squares to shared memory as [K warp][token]."""
    square = square + cute.arch.shuffle_sync_bfly(square, 1)
    square = square + cute.arch.shuffle_sync_bfly(square, 2)
    at = place.shared + shared_layout(plan).squares + (place.k_warp * plan.tokens + place.group) * 4
    ins.shared_store_f32(at, square)


def load_piece(plan: Plan, place: Place, stage: Any) -> list[tuple[ins.Words, ins.Words]]:
    """The warp's part of a stage that has arrived: by step, of the lane's upper and of its lower row."""
    at = _stage_at(plan, place, stage) + place.group * plan.row_pitch + _column(plan, place)
    below = 8 * plan.row_pitch
    offsets = [step * (STEP * 2) for step in range(plan.piece_steps)]
    return [(ins.shared_load(at + offset), ins.shared_load(at + below + offset)) for offset in offsets]


def multiply_piece(
    plan: Plan,
    loaded: list[tuple[ins.Words, ins.Words]],
    words: list[ins.Words],
    piece: int,
    sums: Pair,
    total: Pair | None,
    chain: int | None,
) -> tuple[Pair, Pair | None]:
    """Add a stage's products to the sums; after every `chain` steps they start from zero again."""
    for index, (upper, lower) in enumerate(loaded):
        step = piece * plan.piece_steps + index
        if chain is not None and step and step % chain == 0:
            sums, total = _zero(), _added(total, sums)
        token, which = words[step], step % 2
        value = ins.mma_bf16((upper[0], lower[0], upper[1], lower[1]), token[0:2], sums[which])
        value = ins.mma_bf16((upper[2], lower[2], upper[3], lower[3]), token[2:4], value)
        sums = [value, sums[1]] if which == 0 else [sums[0], value]
    return sums, total


def publish(plan: Plan, place: Place, tile: Any, sums: Pair, total: Pair | None) -> None:
    """Write a tile's sums to shared memory as [K warp][token][row]."""
    even, odd = _added(total, sums)
    base = place.shared + shared_layout(plan).partials
    row = tile * RING_TILE + place.group
    at = base + ((place.k_warp * plan.tokens + place.quad * 2) * plan.pitch + row) * 4
    for part in range(4):
        to = at + (part % 2 * plan.pitch + part // 2 * 8) * 4
        ins.shared_store_f32(to, even[part] + odd[part])


def _zero() -> Pair:
    return [(Float32(0.0),) * 4] * 2


def _added(total: Pair | None, sums: Pair) -> Pair:
    if total is None:
        return sums
    return [
        tuple(a + b for a, b in zip(left, right, strict=True))
        for left, right in zip(total, sums, strict=True)
    ]


def _offsets(plan: Plan) -> list[int]:
    """Bytes from a lane's first part of a row to each of its parts."""
    return [
        piece * plan.piece_bytes + step * (STEP * 2)
        for piece in range(plan.pieces)
        for step in range(plan.piece_steps)
    ]


def _column(plan: Plan, place: Place) -> Any:
    """Bytes from the start of a piece of a row to what the lane reads first."""
    return place.k_warp * (plan.piece_steps * STEP * 2) + place.quad * 16


def _stage_at(plan: Plan, place: Place, stage: Any) -> Any:
    return place.shared + shared_layout(plan).ring + stage % plan.depth * (RING_TILE * plan.row_pitch)


def _filled(plan: Plan, place: Place, stage: Any) -> Any:
    """The barrier that says that a stage has arrived."""
    return place.shared + shared_layout(plan).bars + stage % plan.depth * 8


def _emptied(plan: Plan, place: Place, stage: Any) -> Any:
    """The barrier that says that all computing warps have read a stage."""
    return _filled(plan, place, stage) + plan.depth * 8


def _make_barriers(plan: Plan, place: Place) -> None:
    """One thread: both barriers of every stage."""
    bars = place.shared + shared_layout(plan).bars
    for stage in range(plan.depth):
        ins.asm("mbarrier.init.shared::cta.b64 [$0], 1;", "r", [bars + stage * 8])
        count = Int32(plan.k_warps)
        ins.asm("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", [bars + (plan.depth + stage) * 8, count])
    ins.asm("fence.mbarrier_init.release.cluster;", "", [])
    ins.asm("fence.proxy.async.shared::cta;", "", [])


def _expect_if(bar: Any, size: Any, is_wanted: Any) -> None:
    """`ring.expect` by the lanes whose flag is not 0."""
    template = (
        "{.reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;}"
    )
    ins.asm(template, "r,r,r", [bar, size, is_wanted])


def _arrive_if(bar: Any, is_wanted: Any) -> None:
    """Arrive at a barrier, by the lanes whose flag is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0];}"
    ins.asm(template, "r,r", [bar, is_wanted])
