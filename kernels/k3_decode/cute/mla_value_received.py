"""The end of MLA over a context that is divided over ranks, in one kernel: partial attentions are taken from
the mailbox as they arrive, merged by their lse, multiplied by W_UV and gated. The receiving half of decode
context parallelism; `mla_send` is the other.

Scope: sm_90a (run), sm_100a and sm_103a (compiled); 2 to 16 ranks, 1 to 64 rows, any number of a rank's own
heads whose rows fit a mailbox.

Layout: as `mla_value`, with a leading axis of local ranks: `uv_weight` [L,H,512,128] bf16, constant; `gate`
[L,B,P] and `out` [L,B,P] bf16, row strides free; `mailbox`, `reach`, `control` as `exchange`, words as
`mla_send` puts them. A cluster of 8 blocks a head and local rank; a group of 8 threads takes a row's 64
latent columns of the block from every rank. Blocks wait for `mla_send` of all ranks, never for each other.

Numerics: weights base ** (lse - max) over ranks in fp32, ranks added in ascending order, scaled by the
inverse sum and rounded to bf16; then `mla_value`'s products, order and gate. A rank whose lse is NaN or
infinite has weight 0 whatever its latent holds; without any key the output is 0. Where a rank does not send
in time, its rows are NaN.

Validation: `tests/k3_decode/cute/test_mla_received.py` (its source in lockstep against the float64 oracle,
with empty and uneven shards and both bases; compilation); `collectives/trial_context.py` on GPUs.
"""

import math
from collections.abc import Callable
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.mla_send import LSE_COPIES, bytes_of
from k3_decode.cute.mla_value import (
    CLUSTER,
    LATENT,
    LATENT_PITCH,
    OWN_LATENT,
    OWN_OUT,
    THREADS,
    UV_PITCH,
    V_DIM,
    tokens_of,
)
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mailbox import VECTOR_BYTES, MailboxLayout
from k3_decode.shapes import K3

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_ROWS", "mla_value_received", "variants"]

NAME = "mla_value"
MAX_ROWS = 64
GROUPS = THREADS // 8
"""Groups of 8 threads in a block, each of which takes a row."""


@cute.kernel
def _receive_and_project(
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    uv_weight: cute.Tensor,
    gate: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    steepness: Float32,
    tokens: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, head, local = cute.arch.block_idx()
    heads, rows = uv_weight.shape[1], gate.shape[1]
    last_row = rows - 1
    turns = (tokens + GROUPS - 1) // GROUPS
    uv_at = cute.arch.get_dyn_smem(Uint8, 128).toint()
    latent_at = uv_at + OWN_LATENT * UV_PITCH
    parts_at = latent_at + max(16, tokens) * LATENT_PITCH

    cute.arch.cluster_arrive_relaxed()
    uv_from = ins.byte_address(uv_weight) + Int64(local) * uv_weight.stride[0] * 2
    uv_from = uv_from + Int64(head * LATENT + rank * OWN_LATENT) * (V_DIM * 2)
    for i in cutlass.range_constexpr(OWN_LATENT * V_DIM * 2 // 16 // THREADS):
        piece = tid + i * THREADS
        ins.copy_async(uv_at + piece // 16 * UV_PITCH + piece % 16 * 16, uv_from + Int64(piece * 16))
    cute.arch.cp_async_commit_group()
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    pairs = OWN_OUT // 2
    items = [
        cutlass.min(tid + i * THREADS, tokens * pairs - 1)
        for i in range((tokens * pairs + THREADS - 1) // THREADS)
    ]
    out_rows = [item // pairs for item in items]
    out_columns = [head * V_DIM + rank * OWN_OUT + item % pairs * 2 for item in items]
    gate_at = ins.byte_address(gate) + Int64(local) * gate.stride[0] * 2
    gate_bytes = Int64(gate.stride[1]) * 2
    gates = [
        ins.load_activation_word(gate_at + Int64(cutlass.min(row, last_row)) * gate_bytes + Int64(column) * 2)
        for row, column in zip(out_rows, out_columns, strict=True)
    ]
    state = steps.enter(control, local, limit)
    steps.advance(state, tid, CLUSTER * heads)

    # Groups past the last row look at its words once, and leave them to the group whose they are.
    arrived_at = steps.arrived(mail, state, room)
    lse_rows_at = arrived_at + Int64(rows * heads) * (LATENT * 2) + Int64(rank) * 4
    found_rows = [tid // 8 + turn * GROUPS for turn in range(turns)]
    cute.arch.cp_async_wait_group(0)
    for turn in cutlass.range_constexpr(turns):
        row = found_rows[turn]
        is_mine = Int32(row <= last_row)
        looks = frag.choose_word(is_mine, state.limit, Int32(0))
        place = Int64(cutlass.min(row, last_row) * heads + head)
        lse_at = lse_rows_at + place * (LSE_COPIES * 4)
        lses, lse_missing = steps.collect_word(lse_at, ranks, room, looks)
        vector = place * (LATENT * 2 // VECTOR_BYTES) + Int64(rank * 8 + tid % 8)
        latents_at = arrived_at + vector * VECTOR_BYTES
        latents, missing = steps.collect(latents_at, ranks, room, looks)
        words = _merged([steps.value_of(word) for word in lses], latents, steepness)
        words = steps.poisoned_if(words, missing | lse_missing)
        if row < tokens:
            ins.shared_store(latent_at + row * LATENT_PITCH + tid % 8 * 16, words)
        if row <= last_row:
            steps.rearm(latents_at, ranks, room)
            steps.report(state, latents, missing, Int32(0), Int32(vector), NAME)
            steps.report(state, [(word,) for word in lses], lse_missing, Int32(0), Int32(vector), NAME)
    cute.arch.sync_threads()
    # All eight threads of a row have its lse now.
    for turn in cutlass.range_constexpr(turns):
        if tid % 8 == 0 and found_rows[turn] <= last_row:
            again_at = lse_rows_at + Int64(found_rows[turn] * heads + head) * (LSE_COPIES * 4)
            steps.rearm_word(again_at, ranks, room)

    out_at = ins.byte_address(out) + Int64(local) * out.stride[0] * 2
    _project_and_gate(
        uv_at, latent_at, parts_at, rank, tid, gates, items, out_rows, out_columns, out_at, out.stride[1],
        last_row, tokens,
    )  # fmt: skip
    if tid + rank + head + local == 0:
        steps.count_launch(launches)


@cute.jit
def _project_and_gate(
    uv_at: Int32,
    latent_at: Int32,
    parts_at: Int32,
    rank: Int32,
    tid: Int32,
    gates: Any,
    items: Any,
    out_rows: Any,
    out_columns: Any,
    out_at: Int64,
    out_stride: Int64,
    last_row: Int32,
    tokens: cutlass.Constexpr,
):
    """Merged latents and a block's rows of W_UV, both in shared memory, to gated outputs over the cluster.

    `mla_value` has the same lines in its body: called as a function there, they spill at 64 tokens.
    """
    lane, warp = tid % 32, tid // 32
    quad, quarter = lane // 4, lane % 4
    row_tiles = (tokens + 15) // 16
    rounds = len(items)
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
        to = out_at + Int64(out_rows[i]) * out_stride * 2 + Int64(out_columns[i]) * 2
        is_mine = Int32(tid + i * THREADS < tokens * (OWN_OUT // 2)) * Int32(out_rows[i] <= last_row)
        frag.store_word_if(to, ins.pack_halves(low, high), is_mine)


def _merged(values: list[Float32], latents: list[ins.Words], steepness: Float32) -> ins.Words:
    """8 latent columns over the ranks, weighted by their lse and rounded; zeros without any key."""
    hidden = Float32(-Float32.inf)
    lses = [frag.finite_or_minus_inf(value, Int32(1)) for value in values]
    peak = lses[0]
    for lse in lses[1:]:
        peak = cute.arch.fmax(peak, lse)
    shift = frag.choose_f32(Int32(peak > hidden), peak, Float32(0.0))
    shares = [frag.exp2((lse - shift) * steepness) for lse in lses]
    total, mixed = Float32(0.0), [Float32(0.0)] * 8
    for share, latent in zip(shares, latents, strict=True):
        # A share of 0 adds 0 even to NaN.
        is_kept = Int32(share > 0.0)
        kept = tuple(frag.mask_word(word, is_kept) for word in latent)
        mixed = [m + share * v for m, v in zip(mixed, steps.floats(kept), strict=True)]
        total = total + share
    inverse = frag.keep_if(frag.reciprocal(total), Int32(total > 0.0))
    return tuple(ins.pack_halves(mixed[i] * inverse, mixed[i + 1] * inverse) for i in range(0, 8, 2))


@cute.jit
def _launch(
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    uv_weight: cute.Tensor,
    gate: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    steepness: Float32,
    stream: Any,
    tokens: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    _receive_and_project(
        mailbox, reach, control, uv_weight, gate, out, launches, first_rank, limit, steepness, tokens, ranks,
        room,
    ).launch(
        grid=(CLUSTER, uv_weight.shape[1], uv_weight.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        smem=_shared_bytes(tokens),
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )  # fmt: skip


def _shared_bytes(tokens: int) -> int:
    return OWN_LATENT * UV_PITCH + max(16, tokens) * LATENT_PITCH + CLUSTER * tokens * OWN_OUT * 4 + 128


@memoize
def _compile(tokens: int, ranks: int, room: int) -> Callable[..., None]:
    """The launch for one token class and number of ranks; local ranks, heads, rows and strides are free."""
    local, rows, heads, width = (cute.sym_int32() for _ in range(4))

    def wide() -> Any:
        return cute.sym_int64(divisibility=8)

    row_shape, row_strides = (local, rows, width), (wide(), wide(), 1)
    weight_strides = (wide(), LATENT * V_DIM, V_DIM, 1)
    compiled: Callable[..., None] = cute.compile(
        _launch,
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        make_fake_tensor(BFloat16, (local, heads, LATENT, V_DIM), weight_strides, assumed_align=16),
        make_fake_tensor(BFloat16, row_shape, row_strides, assumed_align=16),
        make_fake_tensor(BFloat16, row_shape, (wide(), wide(), 1), assumed_align=16),
        steps.fake_launches(),
        Int32(0),
        Int32(1),
        Float32(frag.LOG2E),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        tokens,
        ranks,
        room,
        options="--enable-tvm-ffi",
    )
    return compiled


def mla_value_received(
    *,
    uv_weight: "torch.Tensor",
    gate: "torch.Tensor",
    lse_base: LogBase,
    out: "torch.Tensor",
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
) -> None:
    """Write the gated values of what `mla_send` sent to `out`, for every local rank, in one launch;
    `ValueError` if out of scope. `lse_base` must be the sender's.
    """
    heads, rows = uv_weight.shape[1], gate.shape[1]
    size = bytes_of(rows, heads)
    if not 1 <= rows <= MAX_ROWS or size > layout.part_bytes or not 2 <= layout.ranks <= 16:
        raise ValueError(
            f"mla_value_received: {rows} rows outside 1..{MAX_ROWS}, {layout.ranks} ranks outside 2..16, or "
            f"{size} bytes of {layout.part_bytes}"
        )
    steepness = math.log2(LogBase(lse_base))
    launch = _compile(tokens_of(rows), layout.ranks, layout.part_bytes)
    launch(mailbox, reach, control, uv_weight, gate, out, launches, first_rank, limit, steepness)


def variants() -> tuple[Variant, ...]:
    """K3's heads, with room for 64 rows."""
    roles = (
        ("mailbox", "mailbox"), ("reach", "weight"), ("control", "state"), ("uv_weight", "weight"),
        ("gate", "activation"), ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    keys = [(tokens, ranks, bytes_of(64, K3.heads // ranks)) for ranks in (2, 8, 16) for tokens in (1, 8, 64)]
    return tuple(
        Variant(
            op="exchange",
            name=f"mla_value_received_r{key[1]}_b{key[0]}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda key=key: _compile(*key),  # type: ignore[misc]
            parameters=roles,
            source="cute/mla_value_received.py",
            max_cluster=CLUSTER,
        )
        for key in keys
    )
