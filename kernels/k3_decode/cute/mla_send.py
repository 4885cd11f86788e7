"""What a rank's share of the context leaves behind goes to the heads' owners: the splits of each row and head
are merged and sent as they come out of the sum. The sending half of decode context parallelism.

Scope: sm_90a, sm_100a and sm_103a (the last two compiled only); 2 to 16 ranks that divide the heads; any
number of splits, tokens and local ranks, up to `room` bytes for one owner. `mla_value_received` receives, as
the group's next launch; it counts the epoch, so nothing else of the group may come between.

Layout: `partial` [L,S,B,H,512] bf16 and `partial_lse` [L,S,B,H] fp32 to the base `lse_base`, as `mla_attend`
leaves them (L local ranks, S splits, H heads of all ranks); `mailbox`, `reach`, `control` [L,8] (read) as
`exchange`. Rank r owns heads r x H/R onward. Its mailbox gets [B,H/R,512] bf16, then [B,H/R,8] fp32: the
row's lse once for each block of the receiver's cluster, so that every word has one reader. Nothing else is
written.

Numerics: weights base ** (lse - max) in fp32, the mix rounded to bf16 once, splits added in the order of four
places; -0.0 is sent as 0.0. A split whose lse is NaN or infinite counts nothing; without any key the latent
is zero and the lse -inf. One split goes through unchanged but for -0.0.

Validation: `tests/k3_decode/cute/test_mla_received.py` (its source in lockstep, with the receiver, against
the float64 oracle; compilation); `collectives/trial_context.py` on GPUs.
"""

import math
from collections.abc import Callable
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mailbox import MailboxLayout
from k3_decode.shapes import K3

if TYPE_CHECKING:
    import torch

__all__ = ["LSE_COPIES", "bytes_of", "mla_send", "variants"]

LATENT = 512
LSE_COPIES = 8
"""Blocks of the receiver's cluster."""
THREADS_A_ROW = LATENT // 8
PLACES = 4
THREADS = THREADS_A_ROW * PLACES
BATCH = 8
"""Splits that a thread has on their way at once."""


@cute.kernel
def _merge_and_send(
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    steepness: Float32,
    ranks: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    head, token, local = cute.arch.block_idx()
    lane = tid % 32
    splits, tokens, heads = partial.shape[1], partial.shape[2], partial.shape[3]
    place, column = tid // THREADS_A_ROW, tid % THREADS_A_ROW * 8
    sums_at = cute.arch.alloc_smem(Float32, PLACES * LATENT, 16).toint()
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    own = heads // ranks
    there = steps.peer_address(mail, head // own)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    lse_at = ins.byte_address(partial_lse) + Int64(local) * partial_lse.stride[0] * 4
    lse_at = lse_at + (Int64(token) * partial_lse.stride[2] + Int64(head)) * 4
    lse_bytes = Int64(partial_lse.stride[1]) * 4
    from_at = ins.byte_address(partial) + Int64(local) * partial.stride[0] * 2
    from_at = from_at + Int64(token) * partial.stride[2] * 2 + Int64(head * LATENT + column) * 2
    split_bytes = Int64(partial.stride[1]) * 2
    state = steps.enter(control, local, Int32(1))
    hidden = Float32(-Float32.inf)
    peak = hidden
    for base in cutlass.range(lane, splits, 32):
        peak = cute.arch.fmax(peak, _lse(lse_at, lse_bytes, base, splits))
    peak = frag.max_lanes([peak])[0]
    shift = frag.choose_f32(Int32(peak > hidden), peak, Float32(0.0))
    total = Float32(0.0)
    for base in cutlass.range(lane, splits, 32):
        total = total + frag.exp2((_lse(lse_at, lse_bytes, base, splits) - shift) * steepness)
    total = frag.sum_lanes([total], (16, 8, 4, 2, 1))[0]

    mixed = [Float32(0.0)] * 8
    for base in cutlass.range(place, splits, PLACES * BATCH):
        places = [base + i * PLACES for i in range(BATCH)]
        words = [
            ins.load_activation(from_at + Int64(cutlass.min(split, splits - 1)) * split_bytes)
            for split in places
        ]
        values = [_lse(lse_at, lse_bytes, split, splits) for split in places]
        for i in cutlass.range_constexpr(BATCH):
            mixed = _added(mixed, words[i], frag.exp2((values[i] - shift) * steepness))
    spot = sums_at + (place * LATENT + column) * 4
    frag.shared_store_f32x4(spot, (mixed[0], mixed[1], mixed[2], mixed[3]))
    frag.shared_store_f32x4(spot + 16, (mixed[4], mixed[5], mixed[6], mixed[7]))
    cute.arch.sync_threads()

    sent_to = there + state.slot * (ranks * room) + Int64(mail.rank) * room
    row = token * own + head % own
    if place == 0:
        sums = [Float32(0.0)] * 8
        for i in cutlass.range_constexpr(PLACES):
            parts_at = sums_at + (i * LATENT + column) * 4
            parts = (*frag.shared_load_f32x4(parts_at), *frag.shared_load_f32x4(parts_at + 16))
            sums = [s + v for s, v in zip(sums, parts, strict=True)]
        inverse = frag.keep_if(frag.reciprocal(total), Int32(total > 0.0))
        packed = tuple(ins.pack_halves(sums[i] * inverse, sums[i + 1] * inverse) for i in range(0, 8, 2))
        steps.post(sent_to + Int64(row) * (LATENT * 2) + Int64(column) * 2, steps.canonical_words(packed))
    if tid < LSE_COPIES // 4:
        word = steps.canonical_fp32(steps.word_of(peak + frag.log2(total) / steepness))
        behind = Int64(tokens * own) * (LATENT * 2) + Int64(row * LSE_COPIES + tid * 4) * 4
        steps.post(sent_to + behind, (word,) * 4)
    if tid + head + token + local == 0:
        steps.count_launch(launches)


def _lse(address: Int64, split_bytes: Int64, split: Int32, splits: Int32) -> Float32:
    """A split's lse, -inf where it has no keys or does not exist."""
    value = frag.load_f32(address + Int64(cutlass.min(split, splits - 1)) * split_bytes)
    return frag.finite_or_minus_inf(value, Int32(split < splits))


def _added(mixed: list[Float32], words: ins.Words, share: Float32) -> list[Float32]:
    """mixed + share x 8 columns; a share of 0 adds 0 even to NaN."""
    is_kept = Int32(share > 0.0)
    kept = [frag.mask_word(word, is_kept) for word in words]
    return [m + share * v for m, v in zip(mixed, steps.floats(tuple(kept)), strict=True)]


@cute.jit
def _launch(
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    steepness: Float32,
    stream: Any,
    ranks: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    _merge_and_send(
        partial, partial_lse, mailbox, reach, control, launches, first_rank, steepness, ranks, room
    ).launch(
        grid=(partial.shape[3], partial.shape[2], partial.shape[0]),
        block=(THREADS, 1, 1),
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )


@memoize
def _compile(ranks: int, room: int) -> Callable[..., None]:
    """The launch for a number of ranks; all sizes stay symbolic."""
    local, splits, tokens, heads = (cute.sym_int32() for _ in range(4))

    def wide(divisibility: int) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    strides = (wide(8), wide(8), wide(8), LATENT, 1)
    shape = (local, splits, tokens, heads)
    compiled: Callable[..., None] = cute.compile(
        _launch,
        make_fake_tensor(BFloat16, (*shape, LATENT), strides, assumed_align=16),
        make_fake_tensor(Float32, shape, (wide(1), wide(1), wide(1), 1), assumed_align=4),
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        steps.fake_launches(),
        Int32(0),
        Float32(frag.LOG2E),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        ranks,
        room,
        options="--enable-tvm-ffi",
    )
    return compiled


def bytes_of(tokens: int, heads: int) -> int:
    """What one rank sends the owner of `heads` heads."""
    return tokens * heads * (LATENT * 2 + LSE_COPIES * 4)


def mla_send(
    *,
    partial: "torch.Tensor",
    partial_lse: "torch.Tensor",
    lse_base: LogBase,
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
) -> None:
    """Send every local rank's merged partials to the heads' owners, in one launch; `ValueError` if out of
    scope. `limit` is the group's; a sender waits for nobody.
    """
    _local, _splits, tokens, heads, _latent = partial.shape
    size = bytes_of(tokens, heads // layout.ranks)
    if heads % layout.ranks or size > layout.part_bytes:
        raise ValueError(
            f"mla_send: {tokens} rows of {heads} heads over {layout.ranks} ranks, which must divide them, "
            f"need {size} bytes of {layout.part_bytes}"
        )
    steepness = math.log2(LogBase(lse_base))
    launch = _compile(layout.ranks, layout.part_bytes)
    launch(partial, partial_lse, mailbox, reach, control, launches, first_rank, steepness)


def variants() -> tuple[Variant, ...]:
    """K3's heads, with room for 64 rows."""
    roles = (
        ("partial", "activation"), ("partial_lse", "activation"), ("mailbox", "mailbox"), ("reach", "weight"),
        ("control", "state"), ("launches", "workspace"),
    )  # fmt: skip
    keys = [(ranks, bytes_of(64, K3.heads // ranks)) for ranks in (2, 8, 16)]
    return tuple(
        Variant(
            op="exchange",
            name=f"mla_send_r{key[0]}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda key=key: _compile(*key),  # type: ignore[misc]
            parameters=roles,
            source="cute/mla_send.py",
        )
        for key in keys
    )
