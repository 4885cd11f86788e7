"""The routed experts of one rank in one launch: grouping, gate/up, SiTU, down and weighted sum, MXFP4
weights.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). Latent and inter widths multiples of 32, at most 1023
experts, 1 to 64 tokens, `tokens x top_k` at most 1024; ids of one token distinct; an id outside
0..experts-1 is skipped. Weight scale bytes 1 to 254 (byte 0 counts as zero, byte 255 is refused by
`prepare`). The launch must be able to hold one block on every multiprocessor at a time, and at least
latent/32 blocks. At one token the launch can select the experts itself (`router.choose` in every block).

Layout: `latent` [B,L] bf16 (row stride a multiple of 8), `ids` int32 and `weights` fp32 [B,k] compact,
written where the launch selects, from `logits` fp32 [1,E] and `bias` fp32 [E]; `out` [B,L] bf16. `prepare`
reorders the weights once at load (`mxfp4.py`): `w13` per expert and tile of 8 gate + 8 up rows, its K slices
one after another; `w2` per expert and tile of 16 rows. `workspace` (zero it once) holds counters, then the
two places of hidden rows that are waited for (fp16 [8 k, I]), then hidden rows (fp16 [B k, I]).

Schedule: persistent, one block a multiprocessor. Every block groups the tokens by expert
(`token_lists.py`). Phase 1: units (expert, up to 4 of its tokens, tile), contiguous ranges a block; whole
tiles arrive by bulk copies in a ring of four areas; 14 warps split K, 2 more (finishers) add the slices'
sums, ask for the area's next tile and apply SiTU. A tile's arrival thus also tells the 14 that the place of
their sums is free. Phase 2: a block owns 32 output columns for all experts; 16 warps split experts and K,
each with two stages of its own in the memory of the areas, which fill while the blocks wait for each other.

How they wait: up to 8 tokens by the hidden rows themselves, which no writer stores as zero. They lie in one
of two places by turns, which the launch before left zero; every launch clears the other one, and the last
block to leave counts the launch. Whoever needs a row reads it, past L1, until no word of it is zero. Above 8
tokens, and where narrow shards' experts are selected in the launch, by counters: experts form two groups,
so that phase 2 of the first goes on while the second's hidden rows are still on their way. The module is
long because the phases share one ring and one set of registers.

Matrix instructions take 8 columns, of which the even ones carry tokens: a lane then holds no sum that it
does not need, half the scale multiplications of eight tokens, and experts rarely have more than four.

Numerics: activations become fp16 after a power-of-two scaling by the largest of the token's slice (exact
down to 2^-32 of it), products and sums fp32, group scales applied in fp32, K slices summed in ascending
order. SiTU in fp32 on unrounded sums; hidden values are fp16 of 512 h (11 bits from 2^-23 up, absolute
error 2^-34 below). The output is the fp32 sum over experts in a fixed order, rounded once: the same bits in
every run; an expert's tokens do not influence each other. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_experts.py` compiles the variants for the three architectures and
replays packing, decoding, fragment maps and block ranges on the CPU; its GPU tests compare cells with the
float64 oracle. On an H200: TP 1, 2, 4, 8, 16 and the small models, 1 to 64 tokens, hostile regimes,
repeated and replayed launches, and the selecting launch bit for bit against router and experts; launches that
meet by values bit for bit against those that count, at TP4, 8 and 16, 1 to 8 tokens by turns over one
workspace. memcheck is clean, and racecheck on the canary's shapes, before launches met by values. sm_100a and
sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import expert_steps, mxfp4, ring, router, row_plan, token_lists
from k3_decode.cute import instructions as ins
from k3_decode.cute.expert_layout import (
    AREAS,
    CAPACITIES,
    FINISHERS,
    SLOTS,
    THREADS,
    WARPS,
    Form,
    PreparedExperts,
    block_range,
    capacity_of,
    prepare,
    workspace_bytes,
)
from k3_decode.cute.token_lists import COLUMNS
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["Form", "PreparedExperts", "experts", "prepare", "variants", "workspace_bytes"]

OP_INDEX = 5
"""Place of the op in the launch counters."""
BY_VALUE = range(1, 9)
"""Tokens at which blocks meet by the hidden values themselves; at most the least capacity.

On an H200 a layer takes 0.3 to 1.6 us less with it at 2 and 8 tokens; above, two groups hide the meeting.
"""
NARROWEST_BY_VALUE = 384
"""Least width of an expert's shard at which blocks do so that select one token's experts themselves: with
TP8's a layer takes 0.4 to 0.6 us less, with TP16's 192 it takes 0.9 more.
"""


@cute.kernel
def _expert_chain(
    latent: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    w13: cute.Tensor,
    w2: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    form: cutlass.Constexpr,
):
    _chain(latent, ids, weights, w13, w2, workspace, out, launches, None, None, None, form)


@cute.kernel
def _select_and_chain(
    latent: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    w13: cute.Tensor,
    w2: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    logits: cute.Tensor,
    bias: cute.Tensor,
    scale: Float32,
    form: cutlass.Constexpr,
):
    _chain(latent, ids, weights, w13, w2, workspace, out, launches, logits, bias, scale, form)


@cute.jit
def _chain(
    latent: Any,
    ids: Any,
    weights: Any,
    w13: Any,
    w2: Any,
    workspace: Any,
    out: Any,
    launches: Any,
    logits: Any,
    bias: Any,
    scale: Any,
    form: Any,
):
    """The kernel's body."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    row = lane // 4
    tokens = ids.shape[0]
    chunk_groups, slice_groups = form.chunk_groups, form.slice_groups
    size_1, size_2 = mxfp4.stage_bytes(slice_groups), mxfp4.stage_bytes(chunk_groups)
    lists = form.lists

    base = cute.arch.get_dyn_smem(Uint8, 128).toint()
    scratch_at = base + form.ring_bytes
    totals_at = scratch_at + form.scratch_bytes
    bars_at = totals_at + form.totals_bytes
    lists_at = bars_at + (AREAS + SLOTS) * 8

    if tid == 0:
        ring.make_barriers(bars_at, AREAS + SLOTS)
    for j in cutlass.range(lane, tokens * 4, 32, unroll=1):
        at = totals_at + warp * (form.capacity * 64) + j * 16
        ins.asm("st.shared.v4.b32 [$0], {$1,$1,$1,$1};", "r,r", [at, Int32(0)])
    token_lists.clear(lists_at, tid, lists)
    biases = None
    if cutlass.const_expr(form.selects):
        biases = router.load_biases(bias, tid, form.experts)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    number = Int32(0)
    if cutlass.const_expr(form.meets_by_value):
        number = ins.load_activation_word(ins.byte_address(workspace) + ring.ROUND_AT)

    if cutlass.const_expr(form.selects):
        used = _select(logits, biases, scale, ids, weights, tid, bid, lists_at, form)
        items = used
    else:
        items, used = token_lists.build(ids, weights, lists_at, tid, lists)

    # Two groups of experts: while the second's hidden rows arrive, phase 2 of the first goes on.
    split_item, split_rank = Int32(0), Int32(0)
    if cutlass.const_expr(form.meets_by_value):
        split_item = items
    elif items > 0:
        split_item = items // 2
        split_item = split_item - (ring.load_shared(lists_at + lists.items + split_item * 4) >> 16)
        split_rank = ring.load_shared(lists_at + lists.items + split_item * 4) & 0xFFFF
    units_a, units_b = split_item * form.tiles, (items - split_item) * form.tiles
    first_a, mine_a = block_range(bid, units_a, blocks)
    first_b, mine_b = block_range(blocks - 1 - bid, units_b, blocks)
    first_b = first_b + units_a
    mine = mine_a + mine_b
    w13_at, w2_at = ins.byte_address(w13), ins.byte_address(w2)
    if warp == WARPS - FINISHERS:
        for area in cutlass.range_constexpr(AREAS):
            expert_steps.fetch_area(
                Int32(area), Int32(area), first_a, mine_a, first_b, mine, used, bid, lane, w13_at, w2_at,
                base, bars_at, lists_at, form,
            )  # fmt: skip

    counter_at = ins.byte_address(workspace)
    hidden_at = counter_at + form.hidden_offset
    if cutlass.const_expr(form.meets_by_value):
        rounds_at = counter_at + ring.COUNTER_BYTES
        hidden_at = rounds_at + Int64(number & 1) * form.round_bytes
        expert_steps.clear_round(
            rounds_at + Int64((number & 1) ^ 1) * form.round_bytes, tid, bid, blocks, form
        )
    words = cute.make_rmem_tensor((slice_groups * 4,), Int32)
    for i in cutlass.range_constexpr(slice_groups * 4):
        words[i] = Int32(0)
    factor = Float32(0.0)
    members = 32 * (form.slices + 1)
    if warp < form.slices:
        area, phase = Int32(0), Int32(0)
        item, tile, is_new = first_a // form.tiles, first_a % form.tiles, Int32(1)
        place = scratch_at + warp * 256 + lane * 8
        slice_at = base + warp * size_1
        for i in cutlass.range(mine, unroll=1):
            if i == mine_a:
                item, tile, is_new = first_b // form.tiles, first_b % form.tiles, Int32(1)
            if is_new == 1:
                is_new = Int32(0)
                if i == 0 or tokens > 1:
                    factor = expert_steps.load_slice(latent, words, item, warp, lane, lists_at, form)
            # The tile's arrival also says that a finisher has taken the sums that lie where its own go.
            at = slice_at + area * form.area_bytes
            ring.wait(bars_at + area * 8, phase)
            codes = mxfp4.stage_words(at, lane, slice_groups)
            scales = mxfp4.stage_scales(at, row, slice_groups)
            total = mxfp4.multiply(codes, scales, [words[j] for j in range(slice_groups * 4)], slice_groups)
            ins.shared_store_pair(place + area * (form.slices * 256), total[0] * factor, total[1] * factor)
            ring.barrier_arrive(1 + area, members)
            area = area + 1
            if area == AREAS:
                area = Int32(0)
                phase = phase ^ 1
            tile = tile + 1
            if tile == form.tiles:
                tile = Int32(0)
                item = item + 1
                is_new = Int32(1)
    elif warp >= WARPS - FINISHERS:
        has_published = Int32(0)
        for i in cutlass.range(warp - (WARPS - FINISHERS), mine, FINISHERS, unroll=1):
            unit = first_a + i
            if cutlass.const_expr(not form.meets_by_value):  # noqa: SIM102 -- one test the compiler's
                if i >= mine_a:
                    unit = first_b + (i - mine_a)
                    if has_published == 0:
                        _publish(counter_at, lane)
                        has_published = Int32(1)
            area = i % AREAS
            ring.barrier_sync(1 + area, members)
            sums = expert_steps.gather_tile(scratch_at + area * (form.slices * 256) + lane * 8, form)
            cute.arch.sync_warp()
            # All have read the tile's weights, and its sums are taken: its area may hold another.
            expert_steps.fetch_area(
                i + AREAS, area, first_a, mine_a, first_b, mine, used, bid, lane, w13_at, w2_at, base,
                bars_at, lists_at, form,
            )  # fmt: skip
            if cutlass.const_expr(form.meets_by_value):
                expert_steps.store_arriving(sums, hidden_at, unit, lane, lists_at, form)
            else:
                expert_steps.store_hidden(sums, hidden_at, unit, lane, lists_at, form)
        if cutlass.const_expr(not form.meets_by_value):
            if has_published == 0:
                _publish(counter_at, lane)
            _publish(counter_at + 4, lane)
            if bid < form.owners:
                if lane == 0:
                    ring.wait_for(counter_at, blocks * FINISHERS)
                cute.arch.sync_warp()

    if bid < form.owners:
        # The first group's hidden rows are there; looked at, they say so themselves.
        if cutlass.const_expr(not form.meets_by_value):
            cute.arch.sync_threads()
        column = warp % form.columns
        k_warp, lane_of_experts = expert_steps.share_of(warp, form)
        later = (used - lane_of_experts + form.lanes - 1) // form.lanes * form.loops
        slots_at = base + warp // 4 * form.area_bytes + warp % 4 * (2 * form.slot_bytes)
        slot_bars_at = bars_at + (AREAS + 2 * warp) * 8
        slot, phase, has_second = Int32(0), Int32(0), Int32(0)
        sums_2 = totals_at + warp * (form.capacity * 64)
        first = cute.make_rmem_tensor((chunk_groups * 4,), Int32)
        second = cute.make_rmem_tensor((chunk_groups * 4,), Int32)
        if later > 0:
            if cutlass.const_expr(not form.meets_by_value):  # noqa: SIM102 -- one test the compiler's
                if lane_of_experts >= split_rank:
                    has_second = _await_second(counter_at, blocks, lane)
            at = expert_steps.hidden_address(
                hidden_at, Int32(0), Int32(0), lane_of_experts, k_warp, lane, lists_at, form
            )
            expert_steps.load_hidden(first, at, 0, form)
            if cutlass.const_expr(form.parts == 2):
                expert_steps.load_hidden(second, at, 1, form)
        for i in cutlass.range(later, unroll=1):
            here_at, bar = slots_at + slot * form.slot_bytes, slot_bars_at + slot * 8
            ring.wait(bar, phase)
            if cutlass.const_expr(form.meets_by_value):
                expert_steps.await_hidden(
                    first, hidden_at, i, Int32(0), lane_of_experts, k_warp, lane, lists_at, 0, form
                )
            total = expert_steps.multiply_stage(here_at, lane, first, form)
            following = hidden_at
            if i + 1 < later:
                if cutlass.const_expr(not form.meets_by_value):
                    rank = lane_of_experts + (i + 1) // form.loops * form.lanes
                    if has_second == 0 and rank >= split_rank:
                        has_second = _await_second(counter_at, blocks, lane)
                following = expert_steps.hidden_address(
                    hidden_at, i + 1, Int32(0), lane_of_experts, k_warp, lane, lists_at, form
                )
                expert_steps.load_hidden(first, following, 0, form)
            if cutlass.const_expr(form.parts == 2):
                if cutlass.const_expr(form.meets_by_value):
                    expert_steps.await_hidden(
                        second, hidden_at, i, Int32(0), lane_of_experts, k_warp, lane, lists_at, 1, form
                    )
                total = mxfp4.added(total, expert_steps.multiply_stage(here_at + size_2, lane, second, form))
            start, count = token_lists.rank_tokens(
                lists_at, lane_of_experts + i // form.loops * form.lanes, lists
            )
            if (count if not form.selects else 0) > COLUMNS:
                for block in cutlass.range(1, (count + COLUMNS - 1) // COLUMNS, unroll=1):
                    rest = [Float32(0.0)] * 2
                    other = expert_steps.hidden_address(
                        hidden_at, i, block, lane_of_experts, k_warp, lane, lists_at, form
                    )
                    for part in cutlass.range_constexpr(form.parts):
                        expert_steps.load_hidden(second, other, part, form)
                        if cutlass.const_expr(form.meets_by_value):
                            expert_steps.await_hidden(
                                second, hidden_at, i, block, lane_of_experts, k_warp, lane, lists_at, part,
                                form,
                            )  # fmt: skip
                        rest = mxfp4.added(
                            rest, expert_steps.multiply_stage(here_at + part * size_2, lane, second, form)
                        )
                    skipped = block * COLUMNS
                    expert_steps.accumulate(
                        rest, sums_2, start + skipped, count - skipped, lane, lists_at, form
                    )
            if i + 1 < (later if form.parts == 2 else 0):
                expert_steps.load_hidden(second, following, 1, form)
            cute.arch.sync_warp()
            if i + 2 < later:
                source = expert_steps.chunk_address(
                    i + 2, bid, column, k_warp, lane_of_experts, w2_at, lists_at, form
                )
                if lane == 0:
                    ring.expect(bar, form.slot_bytes)
                    ins.bulk_load(here_at, source, Int32(form.slot_bytes), bar)
            expert_steps.accumulate(total, sums_2, start, count, lane, lists_at, form)
            phase = phase ^ slot
            slot = slot ^ 1
        cute.arch.sync_threads()
        expert_steps.write_columns(out, totals_at, tid, bid, tokens, form)
    if tid == 0:
        if cutlass.const_expr(form.meets_by_value):
            ring.leave_round(counter_at, blocks)
        else:
            if bid < form.owners:
                # Nothing may still be published when the last block clears the counters.
                ring.wait_for(counter_at + 4, blocks * FINISHERS)
            ring.leave(counter_at, blocks)
        if bid == 0:
            ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


@cute.jit
def _select(
    logits: cute.Tensor,
    biases: Any,
    scale: Float32,
    ids: cute.Tensor,
    weights: cute.Tensor,
    tid: Int32,
    bid: Int32,
    lists_at: Int32,
    form: cutlass.Constexpr,
):
    """Every block selects the one token's experts, the first one writes them out; returns their number."""
    space_at = lists_at + form.lists.size
    logits_at = ins.byte_address(logits)
    router.choose(logits_at, biases, tid, space_at, form.experts, form.top_k, THREADS)
    if tid < 32:
        expert, share = router.take_choice(space_at, tid, scale, form.experts, form.top_k)
        token_lists.list_choice(expert, share, lists_at, tid, form.lists)
        if bid == 0 and tid < form.top_k:
            ins.store_word(ins.byte_address(ids) + Int64(tid) * 4, expert)
            ins.store_f32(ins.byte_address(weights) + Int64(tid) * 4, share)
    cute.arch.sync_threads()
    return ring.load_shared(lists_at + form.lists.sums)


@cute.jit
def _await_second(counter_at: Int64, blocks: Int32, lane: Int32):
    """One warp: wait until the second group's hidden rows are there; returns 1."""
    if lane == 0:
        ring.wait_for(counter_at + 4, blocks * FINISHERS)
    cute.arch.sync_warp()
    return Int32(1)


@cute.jit
def _publish(counter: Int64, lane: Int32):
    """One finisher warp: its hidden rows of a group are stored."""
    cute.arch.sync_warp()
    if lane == 0:
        ring.arrive(counter)


@cute.jit
def _launch(
    latent: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    w13: cute.Tensor,
    w2: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    blocks: Int32,
    stream: Any,
    form: cutlass.Constexpr,
):
    _expert_chain(latent, ids, weights, w13, w2, workspace, out, launches, form).launch(
        **_launch_of(blocks, stream, form)
    )


@cute.jit
def _launch_selecting(
    latent: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    w13: cute.Tensor,
    w2: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    logits: cute.Tensor,
    bias: cute.Tensor,
    scale: Float32,
    blocks: Int32,
    stream: Any,
    form: cutlass.Constexpr,
):
    _select_and_chain(
        latent, ids, weights, w13, w2, workspace, out, launches, logits, bias, scale, form
    ).launch(**_launch_of(blocks, stream, form))


def _launch_of(blocks: Int32, stream: Any, form: Form) -> dict[str, Any]:
    """How the kernel is launched, but for its arguments."""
    return {
        "grid": (blocks, 1, 1),
        "block": (THREADS, 1, 1),
        "smem": form.shared_bytes,
        "preferred_smem_carveout": row_plan.CARVEOUT,
        "stream": stream,
        "use_pdl": True,
    }


@cache
def _compile(form: Form) -> Callable[..., None]:
    """The launch for one set of constants; tokens, strides and the number of blocks stay symbolic."""
    tokens = cute.sym_int32()

    def rows(width: int, kind: Any = BFloat16) -> Any:
        stride = cute.sym_int64(divisibility=128 // kind.width)
        return make_fake_tensor(kind, (tokens, width), (stride, 1), assumed_align=16)

    def picks(kind: Any) -> Any:
        return make_fake_tensor(kind, (tokens, form.top_k), (form.top_k, 1), assumed_align=4)

    def raw() -> Any:
        return make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=128)

    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (
        rows(form.latent),
        picks(Int32),
        picks(Float32),
        raw(),
        raw(),
        raw(),
        rows(form.latent),
        launches,
    )
    last = (Int32(132), stream, form)
    if form.selects:
        bias = make_fake_tensor(Float32, (form.experts,), (1,), assumed_align=16)
        selection = (rows(form.experts, Float32), bias, Float32(1.0))
        selecting: Callable[..., None] = cute.compile(
            _launch_selecting, *tensors, *selection, *last, options="--enable-tvm-ffi"
        )
        return selecting
    compiled: Callable[..., None] = cute.compile(_launch, *tensors, *last, options="--enable-tvm-ffi")
    return compiled


def experts(
    *,
    latent: "torch.Tensor",
    ids: "torch.Tensor",
    weights: "torch.Tensor",
    prepared: PreparedExperts,
    workspace: "torch.Tensor",
    out: "torch.Tensor",
    launches: "torch.Tensor",
    logits: "torch.Tensor | None" = None,
    bias: "torch.Tensor | None" = None,
    scale: float = 1.0,
    spared: int = 0,
) -> None:
    """Write the weighted sum of the selected experts' MLPs to `out`, in one launch.

    `spared`: multiprocessors left to a kernel that runs beside this one.
    With `logits` and `bias` (and one token only) the launch selects the experts itself, as `router` would,
    and writes `ids` and `weights` beside `out`.
    """
    tokens, top_k = ids.shape
    selects = logits is not None
    if selects and (tokens != 1 or prepared.experts % router.VECTOR):
        raise ValueError(
            f"experts: selecting takes one token and a multiple of {router.VECTOR} experts, not {tokens} and "
            f"{prepared.experts}; call the router first"
        )
    meets = meets_by_value(tokens, prepared.inter, selects)
    form = Form(prepared.latent, prepared.inter, prepared.experts, top_k, capacity_of(tokens), selects, meets)
    blocks = ring.multiprocessors(latent.device.index) - spared
    if blocks < form.owners:
        raise ValueError(
            f"experts: {blocks} multiprocessors, but the form needs {form.owners} blocks at a time"
        )
    launch = _compile(form)
    tensors = (latent, ids, weights, prepared.w13, prepared.w2, workspace, out, launches)
    if selects:
        launch(*tensors, logits, bias, scale, blocks)
    else:
        launch(*tensors, blocks)


def meets_by_value(tokens: int, inter: int, selects: bool) -> bool:
    """Whether a launch's blocks wait for each other by the hidden values, not by counters."""
    return tokens in BY_VALUE and (not selects or inter >= NARROWEST_BY_VALUE)


def variants() -> tuple[Variant, ...]:
    """K3 at TP 1 to 16 and the small models, for 8, 16 and 64 tokens, and for one with the selection."""

    def roles(selects: bool) -> tuple[tuple[str, str], ...]:
        chosen = "output" if selects else "activation"
        given = (
            ("latent", "activation"), ("ids", chosen), ("weights", chosen), ("w13", "weight"),
            ("w2", "weight"), ("workspace", "workspace"), ("out", "output"), ("launches", "workspace"),
        )  # fmt: skip
        return (*given, ("logits", "activation"), ("bias", "weight")) if selects else given

    shapes = [(3584, inter, 896, 16) for inter in (3072, 1536, 768, 384, 256, 192)]
    shapes += [(96, 64, 16, 4), (96, 32, 16, 4), (64, 64, 8, 2), (64, 32, 8, 2)]
    forms = [
        Form(*shape, capacity, meets_by_value=meets_by_value(capacity, shape[1], False))
        for shape in shapes
        for capacity in CAPACITIES
    ]
    forms += [
        Form(*shape, CAPACITIES[0], selects=True, meets_by_value=meets_by_value(1, shape[1], True))
        for shape in shapes
    ]
    rooms = {form: 1 if form.selects else form.capacity for form in forms}
    return tuple(
        Variant(
            op="experts",
            name=f"experts_l{form.latent}_i{form.inter}_e{form.experts}_t{room}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=form: _compile(form),  # type: ignore[misc]
            parameters=roles(form.selects),
            source="cute/experts.py",
            is_smoke=(form.inter, form.capacity, form.selects) == (384, 8, False),
        )
        for form, room in rooms.items()
    )
