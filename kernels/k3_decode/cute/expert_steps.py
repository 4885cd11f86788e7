"""The parts of the expert kernel: requests for weights, activations as fragments, sums and their ends.

Each is done by one warp, or by all threads of a block where it says so. What they leave to the kernel
(`experts.py`): the order of things, every barrier between warps, and the state of its rings.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from k3_decode.cute import instructions as ins
from k3_decode.cute import mxfp4, ring, token_lists
from k3_decode.cute.expert_layout import AREAS, SLOTS, THREADS, Form
from k3_decode.cute.token_lists import COLUMNS

__all__ = [
    "accumulate",
    "await_hidden",
    "chunk_address",
    "clear_round",
    "fetch_area",
    "gather_tile",
    "hidden_address",
    "load_hidden",
    "load_slice",
    "multiply_stage",
    "share_of",
    "store_arriving",
    "store_hidden",
    "write_columns",
]

HIDDEN_EXPONENT = 9
"""Hidden values are stored times 2^9: |SiTU| is at most 100, fp16 ends at 65504."""


def share_of(warp: Int32, form: Form) -> tuple[Int32, Int32]:
    """A warp's part of K and of the experts in phase 2."""
    return warp // form.columns % form.k_warps, warp // (form.columns * form.k_warps)


def chunk_address(
    step: Int32,
    bid: Int32,
    column: Int32,
    k_warp: Int32,
    lane_of_experts: Int32,
    w2_at: Int64,
    lists_at: Int32,
    form: Form,
) -> Int64:
    """Where stage `step` of a warp's phase 2 sequence lies."""
    expert = token_lists.expert_of(lists_at, lane_of_experts + step // form.loops * form.lanes)
    tile = Int64(expert) * (form.latent // 16) + (bid * form.columns + column)
    chunk = k_warp + step % form.loops * form.k_warps
    return w2_at + (tile * (form.chunks // form.parts) + chunk) * form.slot_bytes


@cute.jit
def fetch_area(
    index: Int32,
    area: Int32,
    first_a: Int32,
    mine_a: Int32,
    first_b: Int32,
    mine: Int32,
    used: Int32,
    bid: Int32,
    lane: Int32,
    w13_at: Int64,
    w2_at: Int64,
    base: Int32,
    bars_at: Int32,
    lists_at: Int32,
    form: cutlass.Constexpr,
):
    """One warp: ask for the block's tile number `index`, or, past the last, for the first phase 2 stages of
    four warps.
    """
    if index < mine:
        unit = first_a + index
        if index >= mine_a:
            unit = first_b + (index - mine_a)
        if lane == 0:
            rank = ring.load_shared(lists_at + form.lists.items + unit // form.tiles * 4) & 0xFFFF
            place = token_lists.expert_of(lists_at, rank) * form.tiles + unit % form.tiles
            bar = bars_at + area * 8
            ring.expect(bar, form.tile_bytes)
            at = w13_at + Int64(place) * form.tile_bytes
            ins.bulk_load(base + area * form.area_bytes, at, Int32(form.tile_bytes), bar)
    elif bid < form.owners and lane < SLOTS // AREAS:
        warp, step = area * 4 + lane // 2, lane % 2
        k_warp, lane_of_experts = share_of(warp, form)
        if lane_of_experts + step // form.loops * form.lanes < used:
            at = chunk_address(step, bid, warp % form.columns, k_warp, lane_of_experts, w2_at, lists_at, form)
            bar = bars_at + (AREAS + area * (SLOTS // AREAS) + lane) * 8
            to = base + area * form.area_bytes + lane * form.slot_bytes
            ring.expect(bar, form.slot_bytes)
            ins.bulk_load(to, at, Int32(form.slot_bytes), bar)


def gather_tile(sums_at: Int32, form: Form) -> list[Float32]:
    """Add the K slices of a tile in ascending order."""
    sums = [Float32(0.0)] * 2
    for w in range(form.slices):
        sums = mxfp4.added(sums, list(ins.shared_load_pair(sums_at + w * 256)))
    return sums


@cute.jit
def store_hidden(
    sums: Any, hidden_at: Int64, unit: Int32, lane: Int32, lists_at: Int32, form: cutlass.Constexpr
):
    """SiTU of a tile's sums: 8 hidden values of up to 4 pairs."""
    start, here = token_lists.item_tokens(lists_at, unit // form.tiles, form.lists)
    slot = lane % 4
    if slot < here:
        pair = token_lists.pair_at(lists_at, start + slot, form.lists)
        value = ring.situ(sums[0], sums[1]) * float(2**HIDDEN_EXPONENT)
        to = hidden_at + (Int64(pair) * form.inter + unit % form.tiles * 8 + lane // 4) * 2
        ins.asm("{ .reg .b16 h; cvt.rn.f16.f32 h, $1; st.global.b16 [$0], h; }", "l,f", [to, value])


@cute.jit
def store_arriving(
    sums: Any, hidden_at: Int64, unit: Int32, lane: Int32, lists_at: Int32, form: cutlass.Constexpr
):
    """As `store_hidden`, two values at a time, and never two zeros: whoever waits for them sees that they are
    there. A pair of zeros is stored as 0 and -0.
    """
    start, here = token_lists.item_tokens(lists_at, unit // form.tiles, form.lists)
    slot, row = lane % 4, lane // 4
    value = ring.situ(sums[0], sums[1]) * float(2**HIDDEN_EXPONENT)
    above = cute.arch.shuffle_sync_bfly(value, 4)
    word = ins.asm("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [above, value], [Int32], is_pure=True)
    word = ins.asm(
        "{ .reg .pred p; setp.eq.b32 p, $1, 0; selp.b32 $0, 0x80000000, $1, p; }", "=r,r", [word], [Int32],
        is_pure=True,
    )  # fmt: skip
    if slot < here and row % 2 == 0:
        pair = token_lists.pair_at(lists_at, start + slot, form.lists)
        to = hidden_at + (Int64(pair) * form.inter + unit % form.tiles * 8 + row) * 2
        ins.store_arriving(to, word)


@cute.jit
def clear_round(at: Int64, tid: Int32, bid: Int32, blocks: Int32, form: cutlass.Constexpr):
    """All threads of all blocks: zeros where the next launch's hidden rows will be."""
    zeros = (Int32(0),) * 4
    for j in cutlass.range(bid * THREADS + tid, form.round_bytes // 16, blocks * THREADS, unroll=1):
        ins.store_words(at + Int64(j) * 16, zeros)


@cute.jit
def await_hidden(
    words: cute.Tensor,
    hidden_at: Int64,
    step: Int32,
    block: Int32,
    lane_of_experts: Int32,
    k_warp: Int32,
    lane: Int32,
    lists_at: Int32,
    part: cutlass.Constexpr,
    form: cutlass.Constexpr,
):
    """One warp: fragments that `load_hidden` took are read again until all of their words are there.

    Their address is found again, so that no register holds it.
    """
    missing = _missing(words, form)
    while missing != 0:
        at = hidden_address(hidden_at, step, block, lane_of_experts, k_warp, lane, lists_at, form)
        load_hidden(words, at, part, form)
        missing = _missing(words, form)


def _missing(words: cute.Tensor, form: Form) -> Int32:
    """Not 0 in all lanes where a word of any lane is still zero."""
    least = words[0]
    for j in range(1, form.chunk_groups * 4):
        least = ins.asm("min.u32 $0, $1, $2;", "=r,r,r", [least, words[j]], [Int32], is_pure=True)
    return Int32(cute.arch.vote_ballot_sync(least == 0))


@cute.jit
def load_slice(
    latent: cute.Tensor,
    words: cute.Tensor,
    item: Int32,
    warp: Int32,
    lane: Int32,
    lists_at: Int32,
    form: cutlass.Constexpr,
):
    """This warp's K slice of an item's tokens as fp16 fragments; returns the factor of the lane's token."""
    quarter = lane % 4
    start, here = token_lists.item_tokens(lists_at, item, form.lists)
    pair = token_lists.pair_at(lists_at, start + cutlass.min(lane // 8, here - 1), form.lists)
    at = ins.byte_address(latent) + Int64(token_lists.token_of(pair, form.lists)) * latent.stride[0] * 2
    at = at + Int64(warp * (form.slice_groups * 64) + quarter * 16)
    raw: list[Int32] = []
    for g in cutlass.range_constexpr(form.slice_groups):
        raw.extend(ins.load_activation(at + g * 64))
    largest = Int32(0)
    for word in raw:
        largest = ins.asm(
            "{ .reg .b32 t; and.b32 t, $2, 0x7FFF7FFF; max.u16x2 $0, $1, t; }", "=r,r,r",
            [largest, word], [Int32], is_pure=True,
        )  # fmt: skip
    largest = cutlass.max(largest & 0xFFFF, largest >> 16)
    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1))
    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 2))
    exponent = cutlass.max(largest >> 7, 15)
    scale = ring.as_float((268 - exponent) << 23)
    for j in cutlass.range_constexpr(form.slice_groups * 4):
        low, high = ins.low_half(raw[j]) * scale, ins.high_half(raw[j]) * scale
        words[j] = ins.asm("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], [Int32], is_pure=True)
    return cute.arch.shuffle_sync(ring.as_float(exponent << 23), quarter * 8)


def hidden_address(
    hidden_at: Int64,
    step: Int32,
    block: Int32,
    lane_of_experts: Int32,
    k_warp: Int32,
    lane: Int32,
    lists_at: Int32,
    form: Form,
) -> Int64:
    """Where this lane's part of up to 4 hidden rows begins, at step `step` of the warp's phase 2 sequence."""
    rank = lane_of_experts + step // form.loops * form.lanes
    chunk = (k_warp + step % form.loops * form.k_warps) * form.parts
    start, count = token_lists.rank_tokens(lists_at, rank, form.lists)
    slot = cutlass.min(block * COLUMNS + lane // 8, count - 1)
    pair = token_lists.pair_at(lists_at, start + slot, form.lists)
    at = hidden_at + Int64(pair) * (form.inter * 2)
    return at + Int64(chunk * (form.chunk_groups * 64) + lane % 4 * 16)


@cute.jit
def load_hidden(words: cute.Tensor, at: Int64, part: cutlass.Constexpr, form: cutlass.Constexpr):
    """Fragments of the hidden rows for one chunk of a stage."""
    for g in cutlass.range_constexpr(form.chunk_groups):
        place = at + (part * form.chunk_groups + g) * 64
        loaded = ins.load_arriving(place) if form.meets_by_value else ins.load_activation(place)
        for j in cutlass.range_constexpr(4):
            words[g * 4 + j] = loaded[j]


@cute.jit
def accumulate(
    total: Any,
    sums_at: Int32,
    start: Int32,
    count: Int32,
    lane: Int32,
    lists_at: Int32,
    form: cutlass.Constexpr,
):
    """Add the router's share of 16 rows x up to 4 tokens to the warp's sums [token, 16]."""
    slot = lane % 4
    if slot < count:
        token = token_lists.token_of(token_lists.pair_at(lists_at, start + slot, form.lists), form.lists)
        share = token_lists.share_at(lists_at, start + slot, form.lists)
        share = share * float(2.0 ** (mxfp4.CODE_EXPONENT - HIDDEN_EXPONENT))
        to = sums_at + (token * 16 + lane // 4) * 4
        ins.shared_store_f32(to, ins.shared_load_f32(to) + share * total[0])
        ins.shared_store_f32(to + 32, ins.shared_load_f32(to + 32) + share * total[1])
    cute.arch.sync_warp()


@cute.jit
def write_columns(
    out: cute.Tensor, totals_at: Int32, tid: Int32, bid: Int32, tokens: Int32, form: cutlass.Constexpr
):
    """Sum the warps' accumulators in order and round: two neighbouring columns a thread."""
    pairs = form.columns * 8
    for j in cutlass.range(tid, tokens * pairs, THREADS, unroll=1):
        token, part = j // pairs, j % pairs
        column = part // 8
        low, high = Float32(0.0), Float32(0.0)
        for w in cutlass.range_constexpr(form.k_warps * form.lanes):
            at = (
                totals_at
                + (column + w * form.columns) * (form.capacity * 64)
                + (token * 16 + part % 8 * 2) * 4
            )
            low = low + ins.shared_load_f32(at)
            high = high + ins.shared_load_f32(at + 4)
        to = ins.byte_address(out) + Int64(token) * out.stride[0] * 2 + (bid * pairs + part) * 4
        ins.store_word(to, ins.pack_halves(low, high))


def multiply_stage(at: Int32, lane: Int32, words: Any, form: Form) -> list[Float32]:
    """A chunk of phase 2: 16 rows x up to 4 hidden rows."""
    groups = form.chunk_groups
    codes, scales = mxfp4.stage_words(at, lane, groups), mxfp4.stage_scales(at, lane // 4, groups)
    return mxfp4.multiply(codes, scales, [words[j] for j in range(groups * 4)], groups)
