"""The end of MLA in one kernel: merge of partial attentions, value up-projection W_UV, output gate.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). Any head and token count; shards x tokens a block at most
4096. Refused: other dtypes, latents that are not contiguous over the heads, row strides that are no multiple
of 8 elements.

Layout: a cluster of 8 blocks a head and up to 64 tokens a block. Block r merges latent columns r x 64 onward
of all shards, multiplies them with rows r x 64 onward of `uv_weight` [H, 512, 128] (in shared memory before
the wait), and sends output columns p x 16 onward to block p (DSMEM), which adds the 8 parts, gates and
stores. `partial` [S,B,H,512] bf16 and `partial_lse` [S,B,H] fp32 (to the base `lse_base`) come from the
attention, `gate` [B,P] bf16 (row stride free) from the input projection; `out` [B,P] bf16 is written. The
shards may be ranks of a decode-context-parallel group, splits of one context, or both. A shard whose lse is
NaN or infinite has weight 0, whatever its latent holds; without any key the output is 0.

Numerics: weights base ** (lse - max) / sum in fp32; the merged latent is rounded to bf16; mma with fp32
accumulation over 64 columns, the 8 parts added in ascending order, times sigmoid(gate), rounded once. The
order of sums depends on the number of tokens a block holds, not on timing.

Validation: `tests/k3_decode/cute/test_mla_value.py` compiles every variant for the three architectures and
replays the slot map in numpy; its GPU tests compare with the float64 oracle over heads, batches, shards and
regimes. On an H200 all of that; calls alone, back to back and in replays gave the same bits; memcheck and
racecheck are clean. sm_100a and sm_103a were never run.
"""

import math
from collections.abc import Callable
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.log_base import LogBase

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_WEIGHTS", "mla_value", "tokens_of", "variants"]

OP_INDEX = 10
"""Place of the op in the launch counters."""
CLUSTER = 8
LATENT, V_DIM = 512, 128
OWN_LATENT = LATENT // CLUSTER
OWN_OUT = V_DIM // CLUSTER
THREADS = 256
SLOTS = THREADS * 8 // OWN_LATENT
"""Groups of 8 threads (8 columns each); a group takes one token and every SLOTS/tokens-th shard."""
WARP_SLOTS = 4
BATCH = 4
"""Shards (or tokens x shards) that a thread has on their way at once."""
MAX_WEIGHTS = 4096
UV_PITCH = V_DIM * 2 + 16
LATENT_PITCH = OWN_LATENT * 2 + 16


@cute.kernel
def _value(
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    uv_weight: cute.Tensor,
    gate: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    steepness: Float32,
    tokens: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, head, group = cute.arch.block_idx()
    lane = tid % 32
    warp = tid // 32
    quad, quarter = lane // 4, lane % 4
    shards = partial.shape[0]
    first_row = group * tokens
    last_row = partial.shape[1] - 1
    row_tiles = (tokens + 15) // 16
    slots_a_row = max(1, SLOTS // tokens)
    rows_a_slot = max(1, tokens // SLOTS)
    batch = BATCH // rows_a_slot
    held_slots = min(tokens, WARP_SLOTS)

    uv_at = cute.arch.get_dyn_smem(Uint8, 128).toint()
    latent_at = uv_at + OWN_LATENT * UV_PITCH
    parts_at = latent_at + 16 * row_tiles * LATENT_PITCH
    slots_at = parts_at + CLUSTER * tokens * OWN_OUT * 4
    totals_at = slots_at + SLOTS * OWN_LATENT * 4
    weights_at = totals_at + tokens * 4

    cute.arch.cluster_arrive_relaxed()
    uv_from = ins.byte_address(uv_weight) + Int64(head * LATENT + rank * OWN_LATENT) * (V_DIM * 2)
    for i in cutlass.range_constexpr(OWN_LATENT * V_DIM * 2 // 16 // THREADS):
        piece = tid + i * THREADS
        ins.copy_async(uv_at + piece // 16 * UV_PITCH + piece % 16 * 16, uv_from + Int64(piece * 16))
    cute.arch.cp_async_commit_group()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    # The first shards of each thread's tokens, and the gates, are on their way while the weights are
    # computed.
    slot = tid // 8
    partial_at = ins.byte_address(partial) + Int64(head * LATENT + rank * OWN_LATENT + tid % 8 * 8) * 2
    shard_bytes = Int64(partial.stride[0]) * 2
    token_bytes = Int64(partial.stride[1]) * 2
    slot_rows = [slot % tokens + i * SLOTS for i in range(rows_a_slot)]
    first_shard = slot // tokens if cutlass.const_expr(tokens <= SLOTS) else Int32(0)
    rows_at = [partial_at + Int64(cutlass.min(first_row + row, last_row)) * token_bytes for row in slot_rows]
    early = [
        [
            ins.load_activation(
                at + Int64(cutlass.min(first_shard + i * slots_a_row, shards - 1)) * shard_bytes
            )
            for i in range(batch)
        ]
        for at in rows_at
    ]
    pairs = OWN_OUT // 2
    rounds = (tokens * pairs + THREADS - 1) // THREADS
    items = [cutlass.min(tid + i * THREADS, tokens * pairs - 1) for i in range(rounds)]
    out_rows = [first_row + item // pairs for item in items]
    out_columns = [head * V_DIM + rank * OWN_OUT + item % pairs * 2 for item in items]
    gate_at = ins.byte_address(gate)
    gate_bytes = Int64(gate.stride[0]) * 2
    gates = [
        ins.load_activation_word(gate_at + Int64(cutlass.min(row, last_row)) * gate_bytes + Int64(column) * 2)
        for row, column in zip(out_rows, out_columns, strict=True)
    ]

    # Weights of the shards: `lanes` threads a token.
    lanes = min(32, THREADS // tokens)
    own = tid // lanes
    lse_at = ins.byte_address(partial_lse)
    lse_at = (
        lse_at
        + Int64(cutlass.min(first_row + cutlass.min(own, tokens - 1), last_row)) * partial_lse.stride[1] * 4
    )
    lse_at = lse_at + Int64(head) * 4
    lse_bytes = Int64(partial_lse.stride[0]) * 4
    step = max(1, 8 // tokens)
    offsets = tuple(2**i for i in reversed(range(lanes.bit_length() - 1)))
    peak = Float32(-Float32.inf)
    first_lane = tid % lanes
    kept = [_lse(lse_at, lse_bytes, first_lane + i * lanes, shards) for i in range(step)]
    for value in kept:
        peak = cute.arch.fmax(peak, value)
    for base in cutlass.range(first_lane + lanes * step, shards, lanes):
        peak = cute.arch.fmax(peak, _lse(lse_at, lse_bytes, base, shards))
    for offset in offsets:
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset))
    total = Float32(0.0)
    for i in cutlass.range_constexpr(step):
        share = _share(kept[i], peak, steepness)
        total = total + share
        if first_lane + i * lanes < shards and own < tokens:
            ins.shared_store_f32(weights_at + (own * shards + first_lane + i * lanes) * 4, share)
    for base in cutlass.range(first_lane + lanes * step, shards, lanes):
        later_share = _share(_lse(lse_at, lse_bytes, base, shards), peak, steepness)
        total = total + later_share
        if own < tokens:
            ins.shared_store_f32(weights_at + (own * shards + base) * 4, later_share)
    total = frag.sum_lanes([total], offsets)[0]
    if own < tokens and tid % lanes == 0:
        ins.shared_store_f32(totals_at + own * 4, frag.keep_if(frag.reciprocal(total), Int32(total > 0.0)))
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()

    for r in cutlass.range_constexpr(rows_a_slot):
        row = slot_rows[r]
        merged = [Float32(0.0)] * 8
        for i in cutlass.range_constexpr(batch):
            merged = _added(
                merged, early[r][i], _weight(weights_at, row, first_shard + i * slots_a_row, shards)
            )
        for base in cutlass.range(first_shard + batch * slots_a_row, shards, batch * slots_a_row):
            later = [
                ins.load_activation(
                    rows_at[r] + Int64(cutlass.min(base + i * slots_a_row, shards - 1)) * shard_bytes
                )
                for i in range(batch)
            ]
            for i in cutlass.range_constexpr(batch):
                merged = _added(merged, later[i], _weight(weights_at, row, base + i * slots_a_row, shards))
        if cutlass.const_expr(slots_a_row == 1):
            row_scale = ins.shared_load_f32(totals_at + row * 4)
            ins.shared_store(latent_at + row * LATENT_PITCH + tid % 8 * 16, _scaled_words(merged, row_scale))
        else:
            # Slots of one warp that hold the same token are added by lanes first.
            if cutlass.const_expr(tokens < WARP_SLOTS):
                merged = frag.sum_lanes(merged, (16, 8)[: WARP_SLOTS // tokens // 2])
            own_slot = warp * held_slots + slot % WARP_SLOTS
            if slot % WARP_SLOTS < held_slots:
                spot = slots_at + (own_slot * OWN_LATENT + tid % 8 * 8) * 4
                frag.shared_store_f32x4(spot, (merged[0], merged[1], merged[2], merged[3]))
                frag.shared_store_f32x4(spot + 16, (merged[4], merged[5], merged[6], merged[7]))
    if cutlass.const_expr(slots_a_row > 1):
        cute.arch.sync_threads()
        # slot = shard place x tokens + token: add the places of each token, four columns a thread.
        if tid < tokens * (OWN_LATENT // 4):
            _add_places(slots_at, totals_at, latent_at, tid, tokens, min(slots_a_row, SLOTS // WARP_SLOTS))
    cute.arch.sync_threads()

    # Warp w makes output columns 16 w onward, which block w of the cluster owns.
    uv_words = [
        frag.load_matrix_transposed(uv_at + (k * 16 + lane % 16) * UV_PITCH + warp * 32 + lane // 16 * 16)
        for k in range(OWN_LATENT // 16)
    ]
    cute.arch.cluster_wait()
    there = ins.cluster_address(parts_at + rank * (tokens * OWN_OUT * 4), warp)
    for m in cutlass.range_constexpr(row_tiles):
        left = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        right = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for k in cutlass.range_constexpr(OWN_LATENT // 16):
            a = ins.load_matrix(latent_at + (m * 16 + lane % 16) * LATENT_PITCH + k * 32 + lane // 16 * 16)
            b = uv_words[k]
            left = ins.mma_bf16(a, (b[0], b[1]), left)
            right = ins.mma_bf16(a, (b[2], b[3]), right)
        for half in cutlass.range_constexpr(2):
            own_row = m * 16 + half * 8 + quad
            if own_row < tokens:
                row_there = there + (own_row * OWN_OUT + quarter * 2) * 4
                frag.store_remote_f32x2(row_there, left[2 * half], left[2 * half + 1])
                frag.store_remote_f32x2(row_there + 32, right[2 * half], right[2 * half + 1])
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    for i in cutlass.range_constexpr(rounds):
        low, high = Float32(0.0), Float32(0.0)
        for peer in cutlass.range_constexpr(CLUSTER):
            parts = frag.shared_load_f32x2(parts_at + (peer * (tokens * OWN_OUT) + items[i] * 2) * 4)
            low, high = low + parts[0], high + parts[1]
        low = low * frag.sigmoid(ins.low_half(gates[i]))
        high = high * frag.sigmoid(ins.high_half(gates[i]))
        out_at = ins.byte_address(out) + Int64(out_rows[i]) * out.stride[0] * 2 + Int64(out_columns[i]) * 2
        is_mine = Int32(tid + i * THREADS < tokens * pairs) * Int32(out_rows[i] <= last_row)
        frag.store_word_if(out_at, ins.pack_halves(low, high), is_mine)
    if tid + rank + head + group == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


def _add_places(
    slots_at: Int32, totals_at: Int32, latent_at: Int32, tid: Int32, tokens: int, slots_a_row: int
) -> None:
    """Four columns of a token over its places, scaled, as bf16."""
    row, four = tid // (OWN_LATENT // 4), tid % (OWN_LATENT // 4)
    sums = [Float32(0.0)] * 4
    for place in range(slots_a_row):
        values = frag.shared_load_f32x4(slots_at + ((place * tokens + row) * OWN_LATENT + four * 4) * 4)
        sums = [s + v for s, v in zip(sums, values, strict=True)]
    inverse = ins.shared_load_f32(totals_at + row * 4)
    spot = latent_at + row * LATENT_PITCH + four * 8
    frag.shared_store_word(spot, ins.pack_halves(sums[0] * inverse, sums[1] * inverse))
    frag.shared_store_word(spot + 4, ins.pack_halves(sums[2] * inverse, sums[3] * inverse))


def _lse(address: Int64, shard_bytes: Int64, shard: Int32, shards: Int32) -> Float32:
    """A shard's lse, -inf where it has no keys or does not exist."""
    value = frag.load_f32(address + Int64(cutlass.min(shard, shards - 1)) * shard_bytes)
    return frag.finite_or_minus_inf(value, Int32(shard < shards))


def _share(value: Float32, peak: Float32, steepness: Float32) -> Float32:
    """base ** (value - peak), 0 for a shard without keys; `steepness` is log2(base)."""
    return frag.keep_if(frag.exp2((value - peak) * steepness), Int32(value > -Float32.inf))


def _weight(weights_at: Int32, row: Int32, shard: Int32, shards: Int32) -> Float32:
    value = ins.shared_load_f32(weights_at + (row * shards + cutlass.min(shard, shards - 1)) * 4)
    return frag.keep_if(value, Int32(shard < shards))


def _added(merged: list[Float32], words: ins.Words, weight: Float32) -> list[Float32]:
    """merged + weight x 8 columns; a weight of 0 adds 0 even to NaN."""
    is_kept = Int32(weight > 0.0)
    kept = [frag.mask_word(word, is_kept) for word in words]
    values = [half for word in kept for half in (ins.low_half(word), ins.high_half(word))]
    return [m + weight * v for m, v in zip(merged, values, strict=True)]


def _scaled_words(merged: list[Float32], scale: Float32) -> ins.Words:
    scaled = [m * scale for m in merged]
    return tuple(ins.pack_halves(scaled[i], scaled[i + 1]) for i in range(0, 8, 2))


@cute.jit
def _launch(
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    uv_weight: cute.Tensor,
    gate: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    steepness: Float32,
    stream: Any,
    tokens: cutlass.Constexpr,
):
    groups = (partial.shape[1] + tokens - 1) // tokens
    _value(partial, partial_lse, uv_weight, gate, out, launches, steepness, tokens).launch(
        grid=(CLUSTER, uv_weight.shape[0], groups),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        smem=_shared_bytes(tokens),
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )


def _shared_bytes(tokens: int) -> int:
    rows = max(16, tokens)
    fixed = OWN_LATENT * UV_PITCH + rows * LATENT_PITCH + CLUSTER * tokens * OWN_OUT * 4
    return fixed + SLOTS * OWN_LATENT * 4 + tokens * 4 + MAX_WEIGHTS * 4 + 128


@memoize
def _compile(tokens: int) -> Callable[..., None]:
    """The launch for one token class; heads, tokens, shards and strides stay symbolic."""
    rows, heads, shards, width = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), cute.sym_int32()

    def fake(kind: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
        return make_fake_tensor(kind, shape, stride, assumed_align=align)

    def wide(divisibility: int) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    partial = fake(BFloat16, (shards, rows, heads, LATENT), (wide(8), wide(8), LATENT, 1))
    partial_lse = fake(Float32, (shards, rows, heads), (wide(1), wide(1), 1), 4)
    uv_weight = fake(BFloat16, (heads, LATENT, V_DIM), (LATENT * V_DIM, V_DIM, 1))
    gate = fake(BFloat16, (rows, width), (wide(8), 1))
    out = fake(BFloat16, (rows, width), (wide(8), 1))
    launches = fake(Int32, (cute.sym_int32(),), (1,), 4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch,
        partial,
        partial_lse,
        uv_weight,
        gate,
        out,
        launches,
        Float32(frag.LOG2E),
        stream,
        tokens,
        options="--enable-tvm-ffi",
    )
    return compiled


def tokens_of(tokens: int) -> int:
    """Tokens a block holds: the step's, rounded up to a power of two, at most 64."""
    return min(64, 1 << (tokens - 1).bit_length())


def mla_value(
    *,
    partial: "torch.Tensor",
    partial_lse: "torch.Tensor",
    uv_weight: "torch.Tensor",
    gate: "torch.Tensor",
    lse_base: LogBase,
    out: "torch.Tensor",
    launches: "torch.Tensor",
) -> None:
    """Write the gated values of the merged shards to `out`, in one launch; too many raise `ValueError`."""
    tokens = tokens_of(partial.shape[1])
    if partial.shape[0] * tokens > MAX_WEIGHTS:
        raise ValueError(
            f"mla_value: {partial.shape[0]} shards of {partial.shape[1]} tokens; a block holds "
            f"{MAX_WEIGHTS} weights, "
            f"so give at most {MAX_WEIGHTS // tokens} shards"
        )
    _compile(tokens)(partial, partial_lse, uv_weight, gate, out, launches, math.log2(LogBase(lse_base)))


def variants() -> tuple[Variant, ...]:
    """Every token class from 1 to 64."""
    roles = (
        ("partial", "activation"), ("partial_lse", "activation"), ("uv_weight", "weight"),
        ("gate", "activation"),
        ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="mla_value",
            name=f"mla_value_b{tokens}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda tokens=tokens: _compile(tokens),  # type: ignore[misc]
            parameters=roles,
            source="cute/mla_value.py",
            is_smoke=tokens == 1,
            max_cluster=CLUSTER,
        )
        for tokens in (1, 2, 4, 8, 16, 32, 64)
    )
