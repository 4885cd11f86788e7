"""Kimi Delta Attention of one step in one kernel: convolution, gates, low-rank decay, delta rule, per-head
norm and gate.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). Any head count; any request count in plain decode (`rows`
1), and verify with 2 to 8 rows a request. Refused: rows above 8, dtypes other than bf16 activations and fp32
state, row strides that are no multiple of 8 elements, slot strides that are no multiple of 4 (state) or 8
(conv) elements.

Layout: a cluster of `split` blocks shares one head; block r keeps rows r x 128/split onward of the head's
state S [V, K]. In plain decode a block walks over `steps` requests, its tiles of S read straight into
registers, or each warp's four rows at a time by bulk copies into a ring of its own; in verify over the
rows of one request with S in registers. 8 lanes share a row of S, 16 columns each. `packed` [B,
kda_in_rows] bf16 (q, k, v, g of 128 H channels each, f_a 128, beta H), `conv_weight` [3,4,P] fp32,
`decay_weight` [P,128] bf16, `a_log` [H], `dt_bias` [P], `norm_weight` [128] fp32 are constant;
`conv_state` [slots, 3+rows-1, 3P] bf16 and `state` [slots,H,128,128] fp32 are updated in place, `out`
[B,P] bf16 is written. A request whose first slot is 0 or less is null: its outputs are zeros and nothing
else is written.

Numerics: everything from the convolution to the gate is fp32, decay logits included (bf16 operands, fp32
accumulation by mma, not rounded between). Per row of S the products with k and with q are taken in one pass
over the decayed state, as S_new q = (aS) q + beta (v - (aS) k)(k q). Sums run over 16 columns in ascending
order and then over lanes and blocks in a fixed order, so the bits depend on the split, which `form_of`
chooses by batch and heads, but not on timing. Gates use the approximate exponential and reciprocal (2 ulp).
The conv window is copied bit for bit. NaN and infinities propagate within their request and head.

Validation: `tests/k3_decode/cute/test_kda_step.py` compiles every variant for the three architectures and
replays the lane maps in numpy; its GPU tests compare with the float64 oracle over heads, batches, rows and
input regimes, the conv state bit for bit, and graph replays with changed inputs. `test_kda_ring.py` reads in
the machine code that a place of the ring is refilled only after every load from it was used, and
`test_same_bits.py` repeats layers. On an H200 all of that, at TP1, 2, 4, 8 and 16; calls alone, back to
back, in replays and in layers the same bits; memcheck clean; racecheck clean but for one warning in the
ring, as it does not follow the register that orders loads and refill. sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute import kda_rule, kda_window
from k3_decode.cute.kda_form import (
    CHUNK_BYTES,
    DECODE,
    DIM,
    LANES_A_ROW,
    MAX_ROWS,
    VERIFY,
    VERIFY_ACCEPTED,
    WEIGHT_PITCH,
    Form,
    form_of,
    name_of,
)
from k3_decode.cute.reduction import choose
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["Form", "form_of", "kda_step", "name_of", "variants"]

OP_INDEX = 2
"""Place of the op in the launch counters."""


@cute.kernel
def _kda(
    packed: cute.Tensor,
    conv_weight: cute.Tensor,
    decay_weight: cute.Tensor,
    a_log: cute.Tensor,
    dt_bias: cute.Tensor,
    norm_weight: cute.Tensor,
    conv_state: cute.Tensor,
    state: cute.Tensor,
    slots: cute.Tensor,
    accepted: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    lower_bound: Float32,
    eps: Float32,
    split: cutlass.Constexpr,
    steps: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    mode: cutlass.Constexpr,
    has_bound: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, head, group = cute.arch.block_idx()
    warps = threads // 32
    pass_rows = threads // LANES_A_ROW
    warp_columns = DIM // warps
    # Several steps: windows are renewed before the delta rule, and weights wait in shared memory where there
    # is room, to spare registers.
    is_lean = steps > 1
    is_ring = stages > 1
    lane = tid % 32
    warp = tid // 32
    quad, quarter = lane // 4, lane % 4
    part_lane, part_row = lane % 8, lane // 8
    width = a_log.shape[0] * DIM
    own_rows = DIM // split
    passes = own_rows // pass_rows
    first_row = group * steps
    last_row = packed.shape[0] - 1

    decay_at = cute.arch.alloc_smem(Float32, steps * DIM, 16).toint()
    query_at = cute.arch.alloc_smem(Float32, 2 * steps * DIM, 16).toint()
    key_at = query_at + steps * DIM * 4
    value_at = cute.arch.alloc_smem(Float32, steps * own_rows, 16).toint()
    read_at = cute.arch.alloc_smem(Float32, steps * own_rows, 16).toint()
    beta_at = cute.arch.alloc_smem(Float32, steps, 16).toint()
    squares_at = cute.arch.alloc_smem(Float32, steps * warps, 16).toint()
    blocks_at = cute.arch.alloc_smem(Float32, steps * split, 16).toint()

    # A warp's ring: nobody else waits for it, so the delta rule has no barrier between requests.
    ring_at = Int32(0)
    barriers = cute.arch.alloc_smem(Int64, warps * max(stages, 1), 8)
    barriers_at = barriers.toint() + warp * (max(stages, 1) * 8)
    if cutlass.const_expr(is_ring):
        ring_at = cute.arch.get_dyn_smem(Uint8, 128).toint() + warp * (stages * CHUNK_BYTES)
        if lane == 0:
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(barriers + (warp * stages + i), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    # Constants of the head, before the wait.
    tiles = warp_columns // 8
    decay_words = []
    weights_at = Int32(0)
    if cutlass.const_expr(is_lean and not is_ring):
        weights_at = cute.arch.alloc_smem(Float32, DIM * WEIGHT_PITCH // 4, 16).toint()
        weight_from = ins.byte_address(decay_weight) + Int64(head) * (DIM * DIM * 2)
        for i in cutlass.range_constexpr(DIM * DIM * 2 // 16 // threads):
            piece = tid + i * threads
            ins.copy_async(
                weights_at + piece // 16 * WEIGHT_PITCH + piece % 16 * 16, weight_from + Int64(piece * 16)
            )
        cute.arch.cp_async_commit_group()
    else:
        weight_from = ins.byte_address(decay_weight) + Int64(head * DIM + warp * warp_columns + quad) * (
            DIM * 2
        )
        weight_from = weight_from + Int64(quarter * 16)
        decay_words = [
            [ins.load_weight(weight_from + (n * 8 * DIM * 2 + chunk * 64)) for chunk in range(4)]
            for n in range(tiles)
        ]
    rate = frag.exp2(frag.load_constant(ins.byte_address(a_log) + Int64(head) * 4) * frag.LOG2E)
    bias = frag.load_constant(
        ins.byte_address(dt_bias) + Int64(head * DIM + warp * warp_columns + lane % warp_columns) * 4
    )
    conv_at = ins.byte_address(conv_weight)
    tap_bytes = Int64(width) * 4
    part = warp % 2
    channel = part * width + head * DIM + lane * 4
    taps = kda_window.taps_of(conv_at + Int64(part * 4 * width + head * DIM + lane * 4) * 4, tap_bytes)
    value_lanes = own_rows // 4
    value_rounds = (steps * value_lanes + threads - 1) // threads
    places = [threads - 1 - tid + i * threads for i in range(value_rounds)]
    items = [cutlass.min(place, steps * value_lanes - 1) for place in places]
    channels = [head * DIM + rank * own_rows + item % value_lanes * 4 for item in items]
    value_taps = [kda_window.taps_of(conv_at + Int64(8 * width + c) * 4, tap_bytes) for c in channels]
    final_pairs = steps * own_rows // 2
    final_rounds = (final_pairs + threads - 1) // threads
    pairs = [cutlass.min(tid + i * threads, final_pairs - 1) for i in range(final_rounds)]
    pair_steps = [pair // (own_rows // 2) for pair in pairs]
    pair_columns = [rank * own_rows + pair % (own_rows // 2) * 2 for pair in pairs]
    norms_at = [ins.byte_address(norm_weight) + Int64(column) * 4 for column in pair_columns]
    norms = [(frag.load_constant(at), frag.load_constant(at + 4)) for at in norms_at]
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    # The slots, and at once what hangs on them: the first tile of S and the conv windows.
    slots_at = ins.byte_address(slots)
    slots_bytes = Int64(slots.stride[0]) * 4
    first = Int32(0)
    if cutlass.const_expr(mode == DECODE):
        rows = [cutlass.min(first_row + t, last_row) for t in range(steps)]
        insides = [Int32(first_row + t <= last_row) for t in range(steps)]
        targets = [ins.load_activation_word(slots_at + Int64(row) * slots_bytes) for row in rows]
        lives = [Int32(target > 0) * inside for target, inside in zip(targets, insides, strict=True)]
        homes, sources = targets, targets
    else:
        request_at = slots_at + Int64(group) * slots_bytes
        targets = [ins.load_activation_word(request_at + 4 * t) for t in range(steps)]
        lives, insides, homes = [Int32(targets[0] > 0)], [Int32(1)], [targets[0]]
        sources = [targets[0]]
        if cutlass.const_expr(mode == VERIFY_ACCEPTED):
            first = ins.load_activation_word(ins.byte_address(accepted) + Int64(group) * 4) - 1
            sources = [ins.load_activation_word(request_at + Int64(first) * 4)]
    packed_at = ins.byte_address(packed)
    row_bytes = Int64(packed.stride[0]) * 2
    # Loads that need no slot: f_a (its row `quad` belongs to step `quad`), beta, gate, and this step's conv
    # inputs.
    f_a_at = packed_at + Int64(cutlass.min(first_row + cutlass.min(quad, steps - 1), last_row)) * row_bytes
    f_a_at = f_a_at + Int64(4 * width + quarter * 8) * 2
    low_rank = [ins.load_activation(f_a_at + chunk * 64) for chunk in range(4)]
    step_of_beta = cutlass.min(first_row + cutlass.min(tid, steps - 1), last_row)
    raw_beta = frag.load_bf16(packed_at + Int64(step_of_beta) * row_bytes + Int64(4 * width + DIM + head) * 2)
    pair_rows = [cutlass.min(first_row + t, last_row) for t in pair_steps]
    gates = [
        ins.load_activation_word(
            packed_at + Int64(row) * row_bytes + Int64(3 * width + head * DIM + column) * 2
        )
        for row, column in zip(pair_rows, pair_columns, strict=True)
    ]

    rounds = (2 * steps + warps - 1) // warps
    owners = [warp // 2 + warps // 2 * i for i in range(rounds)]
    owner_steps = [cutlass.min(owner, steps - 1) for owner in owners]
    value_steps = [item // value_lanes for item in items]
    both_at = packed_at + Int64(channel) * 2
    value_at_row = [packed_at + Int64(2 * width + c) * 2 for c in channels]
    both_new = [
        frag.load_pair(both_at + Int64(cutlass.min(first_row + t, last_row)) * row_bytes) for t in owner_steps
    ]
    single_new = [
        frag.load_pair(at + Int64(cutlass.min(first_row + t, last_row)) * row_bytes)
        for at, t in zip(value_at_row, value_steps, strict=True)
    ]
    state_at = ins.byte_address(state)
    state_bytes = Int64(state.stride[0]) * 4
    tile_at = Int64(
        head * (DIM * DIM * 4) + (rank * own_rows + warp * 4 + part_row) * (DIM * 4) + part_lane * 16
    )
    lines = [p * pass_rows * DIM * 4 + i * 128 for p in range(passes) for i in range(4)]
    source_at = [state_at + Int64(cutlass.max(source, 0)) * state_bytes + tile_at for source in sources]
    tile = []
    if cutlass.const_expr(is_ring):
        chunk_at = Int64(head * (DIM * DIM * 4) + (rank * own_rows + warp * 4) * (DIM * 4))
        chunks_at = [
            state_at
            + Int64(cutlass.max(sources[n // passes], 0)) * state_bytes
            + (chunk_at + n % passes * pass_rows * DIM * 4)
            for n in range(steps * passes)
        ]
        for n in cutlass.range_constexpr(min(stages, steps * passes)):
            kda_rule.fill(chunks_at[n], ring_at + n * CHUNK_BYTES, barriers_at + n * 8, lane)
    else:
        tile = [frag.load_f32x4(source_at[0] + line) for line in lines]

    window_at = ins.byte_address(conv_state)
    slot_bytes = Int64(conv_state.stride[0]) * 2
    entry_bytes = Int64(conv_state.stride[1]) * 2
    both = []
    for i in cutlass.range_constexpr(rounds):
        t = owner_steps[i]
        home_at = window_at + Int64(cutlass.max(frag.pick(homes, t), 0)) * slot_bytes + Int64(channel) * 2
        both.append(
            kda_window.window(
                home_at, entry_bytes, both_at, row_bytes, first_row, t, first, mode, both_new[i]
            )
        )
    singles = []
    for i in cutlass.range_constexpr(value_rounds):
        t = value_steps[i]
        home_at = window_at + Int64(cutlass.max(frag.pick(homes, t), 0)) * slot_bytes
        home_at = home_at + Int64(2 * width + channels[i]) * 2
        at = value_at_row[i]
        singles.append(
            kda_window.window(home_at, entry_bytes, at, row_bytes, first_row, t, first, mode, single_new[i])
        )

    if cutlass.const_expr(is_lean and not is_ring):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        weight_lane = weights_at + (warp * warp_columns + quad) * WEIGHT_PITCH + quarter * 16
        decay_words = [
            [ins.shared_load(weight_lane + n * 8 * WEIGHT_PITCH + chunk * 64) for chunk in range(4)]
            for n in range(tiles)
        ]
    zero = Int32(0)
    for n in cutlass.range_constexpr(tiles):
        sums = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for chunk in cutlass.range_constexpr(4):
            a, b = low_rank[chunk], decay_words[n][chunk]
            sums = ins.mma_bf16((a[0], zero, a[1], zero), (b[0], b[1]), sums)
            sums = ins.mma_bf16((a[2], zero, a[3], zero), (b[2], b[3]), sums)
        if quad < steps:
            place = decay_at + (quad * DIM + warp * warp_columns + n * 8 + quarter * 2) * 4
            frag.shared_store_f32x2(place, sums[0], sums[1])
    cute.arch.sync_warp()
    lane_steps = 32 // warp_columns
    for i in cutlass.range_constexpr((steps + lane_steps - 1) // lane_steps):
        t = lane // warp_columns + i * lane_steps
        place = decay_at + (cutlass.min(t, steps - 1) * DIM + warp * warp_columns + lane % warp_columns) * 4
        decay = kda_rule.decay_of(ins.shared_load_f32(place) + bias, rate, lower_bound, has_bound)
        if t < steps:
            ins.shared_store_f32(place, decay)

    for i in cutlass.range_constexpr(rounds):
        y = kda_window.convolved(both[i], taps)
        square = y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]
        square = frag.sum_lanes([square], (16, 8, 4, 2, 1))[0]
        scale = cute.rsqrt(square + 1e-6) * choose(part, Float32(1.0), Float32(DIM**-0.5))
        if owners[i] < steps:
            place = query_at + (part * (steps * DIM) + owners[i] * DIM + lane * 4) * 4
            frag.shared_store_f32x4(place, (y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale))
    for i in cutlass.range_constexpr(value_rounds):
        y = kda_window.convolved(singles[i], value_taps[i])
        if places[i] < steps * value_lanes:
            frag.shared_store_f32x4(value_at + items[i] * 16, y)
    if tid < steps:
        ins.shared_store_f32(beta_at + tid * 4, frag.sigmoid(raw_beta))
    cute.arch.sync_threads()
    # This block has its part of the window in registers (a relaxed arrival: nothing it wrote is published
    # here).
    if cutlass.const_expr(split > 1):
        cute.arch.cluster_arrive_relaxed()
    if cutlass.const_expr(is_lean):
        if cutlass.const_expr(split > 1):
            cute.arch.cluster_wait()
        for i in cutlass.range_constexpr(rounds):
            is_mine = Int32((2 * owners[i] + part) % split == rank) * Int32(owners[i] < steps)
            is_mine = is_mine * frag.pick(lives, owner_steps[i])
            home_at = window_at + Int64(frag.pick(homes, owner_steps[i])) * slot_bytes + Int64(channel) * 2
            kda_window.renew(home_at, entry_bytes, both[i], owner_steps[i], is_mine, mode)
        for i in cutlass.range_constexpr(value_rounds):
            is_mine = Int32(places[i] < steps * value_lanes) * frag.pick(lives, value_steps[i])
            home_at = window_at + Int64(frag.pick(homes, value_steps[i])) * slot_bytes
            home_at = home_at + Int64(2 * width + channels[i]) * 2
            kda_window.renew(home_at, entry_bytes, singles[i], value_steps[i], is_mine, mode)

    # The delta rule, step by step.
    for t in cutlass.range_constexpr(steps):
        ahead = []
        if cutlass.const_expr(stages == 1 and mode == DECODE and t + 1 < steps):
            ahead = [frag.load_f32x4(source_at[t + 1] + line) for line in lines]
        spot = t * DIM * 4 + part_lane * 16
        beta = ins.shared_load_f32(beta_at + t * 4)
        target_at = state_at + Int64(targets[t]) * state_bytes + tile_at
        live = lives[t] if cutlass.const_expr(mode == DECODE) else lives[0]
        square = Float32(0.0)
        if cutlass.const_expr(is_ring):
            all_decays = [frag.shared_load_f32x4(decay_at + spot + i * 128) for i in range(4)]
            all_keys = [frag.shared_load_f32x4(key_at + spot + i * 128) for i in range(4)]
            all_queries = [frag.shared_load_f32x4(query_at + spot + i * 128) for i in range(4)]
            both_dot = kda_rule.dots_of(all_keys, all_queries)
            for p in cutlass.range_constexpr(passes):
                n = t * passes + p
                place_at = ring_at + n % stages * CHUNK_BYTES
                chunk_lane = place_at + part_row * (DIM * 4) + part_lane * 16
                cute.arch.mbarrier_wait(barriers + (warp * stages + n % stages), n // stages % 2)
                part_tile = [frag.shared_load_f32x4(chunk_lane + i * 128) for i in range(4)]
                part_tile = [kda_rule.decayed(part_tile[i], all_decays[i]) for i in range(4)]
                dots = [kda_rule.dots_of(part_tile, all_keys), kda_rule.dots_of(part_tile, all_queries)]
                dots = frag.sum_lanes([*dots, both_dot] if p == 0 else dots, (4, 2, 1))
                both_dot = dots[2] if p == 0 else both_dot
                place = (t * own_rows + p * pass_rows + warp * 4 + part_row) * 4
                factor = beta * (ins.shared_load_f32(value_at + place) - dots[0])
                read = dots[1] + factor * both_dot
                square = square + read * read
                if part_lane == 0:
                    ins.shared_store_f32(read_at + place, read)
                # A value that hangs on all of them has been stored, so the warp's loads are done. Issued and
                # not used, they may wait behind stores that memory holds up, longer than a copy takes.
                cute.arch.sync_warp()
                if cutlass.const_expr(n + stages < steps * passes):
                    kda_rule.fill(chunks_at[n + stages], place_at, barriers_at + n % stages * 8, lane)
                for i in cutlass.range_constexpr(4):
                    row = kda_rule.updated(part_tile[i], factor, all_keys[i])
                    frag.store_f32x4_if(target_at + lines[p * 4 + i], row, live)
        else:
            dots = [Float32(0.0)] * (2 * passes + 1)
            for i in cutlass.range_constexpr(4):
                decays = frag.shared_load_f32x4(decay_at + spot + i * 128)
                keys = frag.shared_load_f32x4(key_at + spot + i * 128)
                queries = frag.shared_load_f32x4(query_at + spot + i * 128)
                for p in cutlass.range_constexpr(passes):
                    tile[p * 4 + i] = kda_rule.decayed(tile[p * 4 + i], decays)
                    dots[2 * p] = dots[2 * p] + kda_rule.dot(tile[p * 4 + i], keys)
                    dots[2 * p + 1] = dots[2 * p + 1] + kda_rule.dot(tile[p * 4 + i], queries)
                dots[2 * passes] = dots[2 * passes] + kda_rule.dot(keys, queries)
            dots = frag.sum_lanes(dots, (4, 2, 1))
            factors = []
            for p in cutlass.range_constexpr(passes):
                place = (t * own_rows + p * pass_rows + warp * 4 + part_row) * 4
                factors.append(beta * (ins.shared_load_f32(value_at + place) - dots[2 * p]))
                read = dots[2 * p + 1] + factors[p] * dots[2 * passes]
                square = square + read * read
                if part_lane == 0:
                    ins.shared_store_f32(read_at + place, read)
            for i in cutlass.range_constexpr(4):
                keys = frag.shared_load_f32x4(key_at + spot + i * 128)
                for p in cutlass.range_constexpr(passes):
                    tile[p * 4 + i] = kda_rule.updated(tile[p * 4 + i], factors[p], keys)
                    frag.store_f32x4_if(target_at + lines[p * 4 + i], tile[p * 4 + i], live)
        square = frag.sum_lanes([square], (16, 8))[0]
        if lane == 0:
            ins.shared_store_f32(squares_at + (t * warps + warp) * 4, square)
        if cutlass.const_expr(not is_ring and mode == DECODE and t + 1 < steps):
            if cutlass.const_expr(stages == 1):
                tile = ahead
            else:
                tile = [frag.load_f32x4(source_at[t + 1] + line) for line in lines]

    # Sums of squares to all blocks of the head; past the first barrier they all hold their windows, which may
    # change.
    cute.arch.sync_threads()
    if cutlass.const_expr(split > 1 and not is_lean):
        cute.arch.cluster_wait()
    if tid < steps * split:
        owner, peer = tid // split, tid % split
        total = Float32(0.0)
        for w in cutlass.range_constexpr(warps):
            total = total + ins.shared_load_f32(squares_at + (owner * warps + w) * 4)
        there = ins.cluster_address(blocks_at + (owner * split + rank) * 4, peer)
        frag.store_remote_f32(there, total)
    if cutlass.const_expr(split > 1):
        cute.arch.cluster_arrive()
    else:
        cute.arch.sync_threads()
    if cutlass.const_expr(not is_lean):
        for i in cutlass.range_constexpr(rounds):
            is_mine = Int32((2 * owners[i] + part) % split == rank) * Int32(owners[i] < steps) * lives[0]
            home_at = window_at + Int64(homes[0]) * slot_bytes + Int64(channel) * 2
            kda_window.renew(home_at, entry_bytes, both[i], owner_steps[i], is_mine, mode)
        for i in cutlass.range_constexpr(value_rounds):
            is_mine = Int32(places[i] < value_lanes) * lives[0]
            home_at = window_at + Int64(homes[0]) * slot_bytes + Int64(2 * width + channels[i]) * 2
            kda_window.renew(home_at, entry_bytes, singles[i], value_steps[i], is_mine, mode)
    if cutlass.const_expr(split > 1):
        cute.arch.cluster_wait()

    for i in cutlass.range_constexpr(final_rounds):
        t = pair_steps[i]
        total = Float32(0.0)
        for peer in cutlass.range_constexpr(split):
            total = total + ins.shared_load_f32(blocks_at + (t * split + peer) * 4)
        scale = cute.rsqrt(total * (1.0 / DIM) + eps)
        at = read_at + (t * own_rows + pair_columns[i] - rank * own_rows) * 4
        low = ins.shared_load_f32(at) * scale * norms[i][0]
        high = ins.shared_load_f32(at + 4) * scale * norms[i][1]
        low = low * frag.sigmoid(ins.low_half(gates[i]))
        high = high * frag.sigmoid(ins.high_half(gates[i]))
        word = frag.mask_word(ins.pack_halves(low, high), frag.pick(lives, t))
        out_at = ins.byte_address(out) + Int64(pair_rows[i]) * out.stride[0] * 2
        is_mine = Int32(tid + i * threads < final_pairs) * frag.pick(insides, t)
        frag.store_word_if(out_at + Int64(head * DIM + pair_columns[i]) * 2, word, is_mine)
    if tid + rank + head + group == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


@cute.jit
def _launch(
    packed: cute.Tensor,
    conv_weight: cute.Tensor,
    decay_weight: cute.Tensor,
    a_log: cute.Tensor,
    dt_bias: cute.Tensor,
    norm_weight: cute.Tensor,
    conv_state: cute.Tensor,
    state: cute.Tensor,
    slots: cute.Tensor,
    accepted: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    lower_bound: Float32,
    eps: Float32,
    stream: Any,
    split: cutlass.Constexpr,
    steps: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    mode: cutlass.Constexpr,
    has_bound: cutlass.Constexpr,
):
    groups = (packed.shape[0] + steps - 1) // steps
    _kda(
        packed, conv_weight, decay_weight, a_log, dt_bias, norm_weight, conv_state, state, slots, accepted,
        out, launches, lower_bound, eps, split, steps, threads, stages, mode, has_bound,
    ).launch(
        grid=(split, a_log.shape[0], groups),
        block=(threads, 1, 1),
        cluster=(split, 1, 1),
        smem=stages * (threads // 32) * CHUNK_BYTES + 128 if stages > 1 else 0,
        min_blocks_per_mp=blocks,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


@cache
def _compile(form: Form) -> Callable[..., None]:
    """The launch for one split and step count; heads, batch, slots and strides stay symbolic."""
    tokens, heads, width = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(divisibility=DIM)
    slots_count, requests, columns = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()

    def fake(kind: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
        return make_fake_tensor(kind, shape, stride, assumed_align=align)

    def wide(divisibility: int) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    packed = fake(BFloat16, (tokens, cute.sym_int32()), (wide(8), 1))
    conv_weight = fake(Float32, (3, 4, width), (wide(4), wide(4), 1))
    decay_weight = fake(BFloat16, (width, DIM), (DIM, 1))
    a_log = fake(Float32, (heads,), (1,), 4)
    dt_bias = fake(Float32, (width,), (1,))
    norm_weight = fake(Float32, (DIM,), (1,))
    conv_state = fake(BFloat16, (slots_count, cute.sym_int32(), cute.sym_int32()), (wide(8), wide(8), 1))
    state = fake(Float32, (slots_count, heads, DIM, DIM), (wide(4), DIM * DIM, DIM, 1))
    slots = fake(Int32, (requests, columns), (wide(1), 1), 4)
    accepted = fake(Int32, (cute.sym_int32(),), (wide(1),), 4)
    out = fake(BFloat16, (tokens, width), (wide(8), 1))
    launches = fake(Int32, (cute.sym_int32(),), (1,), 4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, packed, conv_weight, decay_weight, a_log, dt_bias, norm_weight, conv_state, state, slots,
        accepted, out, launches, Float32(-5.0), Float32(1e-5), stream, *form,
        options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


def kda_step(
    *,
    packed: "torch.Tensor",
    conv_weight: "torch.Tensor",
    decay_weight: "torch.Tensor",
    a_log: "torch.Tensor",
    dt_bias: "torch.Tensor",
    norm_weight: "torch.Tensor",
    conv_state: "torch.Tensor",
    state: "torch.Tensor",
    slots: "torch.Tensor",
    accepted: "torch.Tensor | None",
    rows: int,
    lower_bound: float | None,
    out: "torch.Tensor",
    eps: float,
    launches: "torch.Tensor",
    form: Form | None = None,
) -> None:
    """Advance conv windows and states by `rows` rows a request and write the gated outputs, in one launch.

    `form` overrides the choice of `form_of` (for measurements). Raises `ValueError` for what the kernel
    refuses.
    """
    requests = slots.shape[0]
    if not 1 <= rows <= MAX_ROWS or requests * rows != packed.shape[0]:
        raise ValueError(
            f"kda_step: {rows} rows of {requests} requests for {packed.shape[0]} packed rows; 1 to 8 run"
        )
    chosen = form or form_of(requests, rows, a_log.shape[0], lower_bound is not None, accepted is not None)
    _compile(chosen)(
        packed, conv_weight, decay_weight, a_log, dt_bias, norm_weight, conv_state, state, slots,
        slots[:, 0] if accepted is None else accepted, out, launches,
        0.0 if lower_bound is None else lower_bound, eps,
    )  # fmt: skip


def variants() -> tuple[Variant, ...]:
    """Plain decode over splits and steps, verify of 2 to 8 rows, and the unbounded decay of Kimi-Linear."""
    roles = (
        ("packed", "activation"), ("conv_weight", "weight"), ("decay_weight", "weight"), ("a_log", "weight"),
        ("dt_bias", "weight"), ("norm_weight", "weight"), ("conv_state", "state"), ("state", "state"),
        ("slots", "index"), ("accepted", "index"), ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    shapes = [(4, 1, 128, 0, 3), (2, 1, 128, 0, 3), (1, 1, 256, 0, 2)]
    shapes += [(1, steps, 256, 6, 1) for steps in range(3, 7)] + [(1, 3, 256, 3, 2)]
    forms = [Form(*shape, DECODE, has_bound) for shape in shapes for has_bound in (True, False)]
    forms += [
        Form(split, rows, 128, 0, 3, mode, True)
        for mode in (VERIFY_ACCEPTED, VERIFY)
        for split in (8, 4)
        for rows in range(2, MAX_ROWS + 1)
    ]
    return tuple(
        Variant(
            op="kda_step",
            name=name_of(form),
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=form: _compile(form),  # type: ignore[misc]
            parameters=roles,
            source="cute/kda_step.py",
            is_smoke=form == (4, 1, 128, 0, 3, DECODE, True),
            max_cluster=form.split,
        )
        for form in forms
    )
