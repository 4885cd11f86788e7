"""What the MoE tail needs of its peers, in one launch: the latent's sum on every rank, and of the shared
expert's sum each rank's own columns.

Scope: sm_90a, sm_100a and sm_103a (the last two compiled only); 2 to 16 ranks that divide the columns into
whole 16-byte vectors; up to `room` bytes of both a part. Then `latent_tail` norms the latent and projects it
onto the rank's columns, adding `shared_out`, and `exchange_parts` (or the next AttnRes) distributes them.

Layout: `latent` [L,B,D] and `shared` [L,B,H] bf16 parts, `latent_out` [L,B,D], `shared_out` [L,B,H/R] bf16;
row strides free, rows 16-byte aligned; `mailbox`, `reach`, `control` as `exchange`. In a mailbox the latent
comes first, then the shared rows.

Numerics: as `exchange`: fp32 in rank order, rounded once; -0.0 counts as 0.0; NaN where a peer is missing.

Validation: `tests/k3_decode/cute/test_exchange_parts.py` (source on threads); on an H200 with 2 to 16 played
ranks, and between two H200s, every word was right at 1 to 64 rows (`collectives/trial_fused.py`); memcheck
and racecheck found nothing.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import instructions as ins
from k3_decode.cute.exchange import THREADS, blocks_of
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.mailbox import VECTOR_BYTES, MailboxLayout
from k3_decode.shapes import K3

if TYPE_CHECKING:
    import torch

__all__ = ["moe_exchange", "variants"]

NAME = "moe_tail"


@cute.kernel
def _exchange_tail(
    latent: cute.Tensor,
    shared: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    latent_out: cute.Tensor,
    shared_out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    ranks: cutlass.Constexpr,
    latent_width: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
):
    _, _, local = cute.arch.block_idx()
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()

    # Threads take latents from the front and shared rows from the back, in loops of their own. The first of
    # each is asked for together with the control; threads that have none ask for the last one.
    own = width // ranks
    rows = latent.shape[1]
    latents = rows * latent_width
    first, step = bid * THREADS + tid, blocks * THREADS
    last = step - 1 - first
    asked = (
        _vector_of(latent, local, cutlass.min(first, latents - 1), latent_width),
        _vector_of(shared, local, cutlass.min(last, rows * width - 1), width),
    )
    turn = steps.begin(mail, control, local, limit, room, THREADS, delay_ns, asked)
    state = turn.state
    behind = turn.sent_to + Int64(latents) * VECTOR_BYTES
    # Made fit outside the branches, or the loads sink into them.
    of_latent, of_shared = (steps.canonical_words(words) for words in turn.words)
    if first < latents:
        steps.post_to_all(mail, turn.sent_to + Int64(first) * VECTOR_BYTES, of_latent)
    if last < rows * width:
        place = behind + Int64(last) * VECTOR_BYTES
        owner = steps.peer_address(mail, last % width // own)
        steps.post(owner + place, of_shared)
    for i in cutlass.range(first + step, latents, step, unroll=1):
        more = steps.canonical_words(ins.load_activation(_vector_of(latent, local, i, latent_width)))
        steps.post_to_all(mail, turn.sent_to + Int64(i) * VECTOR_BYTES, more)
    for j in cutlass.range(last + step, rows * width, step, unroll=1):
        rest = steps.canonical_words(ins.load_activation(_vector_of(shared, local, j, width)))
        steps.post(steps.peer_address(mail, j % width // own) + behind + Int64(j) * VECTOR_BYTES, rest)
    steps.advance(state, turn.tid, turn.blocks)
    steps.delay(state, mail, delay_ns, 1)

    for i in cutlass.range(first, latents, step, unroll=1):
        to = _vector_of(latent_out, local, i, latent_width)
        _receive(mail, state, turn.parts_at, i, to, room)
    for j in cutlass.range(last, rows * own, step, unroll=1):
        to = _vector_of(shared_out, local, j, own)
        v = latents + j // own * width + mail.rank * own + j % own
        _receive(mail, state, turn.parts_at, v, to, room)
    if turn.tid + turn.bid + local == 0:
        steps.count_launch(launches)


def _receive(mail: Any, state: Any, parts_at: Int64, vector: Int32, to: Int64, room: int) -> None:
    """Wait for one vector of every rank, and store the sum."""
    at = parts_at + Int64(vector) * VECTOR_BYTES
    parts, missing = steps.collect(at, mail.ranks, room, state.limit)
    ins.store_words(to, steps.poisoned_if(steps.sum_in_rank_order(parts), missing))
    steps.rearm(at, mail.ranks, room)
    steps.report(state, parts, missing, Int32(0), vector, NAME)


def _vector_of(tensor: cute.Tensor, local: Int32, i: Int32, width: int) -> Int64:
    """Device address of a local rank's 16-byte vector `i`, of `width` a row."""
    row = (
        ins.byte_address(tensor)
        + Int64(local) * tensor.stride[0] * 2
        + Int64(i // width) * tensor.stride[1] * 2
    )
    return row + Int64(i % width) * VECTOR_BYTES


@cute.jit
def _launch(
    latent: cute.Tensor,
    shared: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    latent_out: cute.Tensor,
    shared_out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    blocks: Int32,
    stream: Any,
    ranks: cutlass.Constexpr,
    latent_width: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
    is_early: cutlass.Constexpr,
):
    _exchange_tail(
        latent, shared, mailbox, reach, control, latent_out, shared_out, launches, first_rank, limit, ranks,
        latent_width, width, room, delay_ns,
    ).launch(
        grid=(blocks, 1, latent.shape[0]),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=4,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=is_early,
    )  # fmt: skip


@cache
def _compile(
    ranks: int, latent_width: int, width: int, room: int, delay_ns: int = 0, is_early: bool = True
) -> Callable[..., None]:
    """The launch for 16-byte vectors a row; local ranks, rows and strides stay symbolic."""
    local, rows = cute.sym_int32(), cute.sym_int32()

    def row_tensor(width: int) -> Any:
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return make_fake_tensor(BFloat16, (local, rows, width * 8), strides, assumed_align=16)

    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_tensor(latent_width),
        row_tensor(width),
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        row_tensor(latent_width),
        row_tensor(width // ranks),
        steps.fake_launches(),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        ranks,
        latent_width,
        width,
        room,
        delay_ns,
        is_early,
        options="--enable-tvm-ffi",
    )
    return compiled


def moe_exchange(
    *,
    latent: "torch.Tensor",
    shared: "torch.Tensor",
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    latent_out: "torch.Tensor",
    shared_out: "torch.Tensor",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
    sharing: int = 1,
    delay_ns: int = 0,
) -> None:
    """Write the latent's sum and this rank's columns of the shared expert's, for every local rank, in one
    launch; `ValueError` if out of scope. `sharing` and `delay_ns` as in `exchange`.
    """
    local, rows, wide = latent.shape
    columns = shared.shape[2]
    size = rows * (wide + columns) * 2
    if columns % (8 * layout.ranks) or wide % 8 or size > layout.part_bytes:
        raise ValueError(
            f"moe_exchange: {rows} rows of {wide} + {columns} columns need {size} bytes of "
            f"{layout.part_bytes}, and 8 x {layout.ranks} ranks must divide the columns"
        )
    launch = _compile(layout.ranks, wide // 8, columns // 8, layout.part_bytes, delay_ns, sharing == 1)
    blocks = blocks_of(rows * (wide + columns) // 8, local * sharing)
    launch(
        latent, shared, mailbox, reach, control, latent_out, shared_out, launches, first_rank, limit, blocks
    )  # fmt: skip


def variants() -> tuple[Variant, ...]:
    """K3's, at every number of ranks, with room for 64 rows."""
    roles = (
        ("latent", "activation"), ("shared", "activation"), ("mailbox", "mailbox"), ("reach", "weight"),
        ("control", "state"), ("latent_out", "output"), ("shared_out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    room = 64 * (K3.latent + K3.hidden) * 2
    return tuple(
        Variant(
            op="exchange",
            name=f"moe_exchange_r{ranks}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda key=(ranks, K3.latent // 8, K3.hidden // 8, room): _compile(*key),  # type: ignore[misc]
            parameters=roles,
            source="cute/moe_exchange.py",
        )
        for ranks in (2, 4, 8, 16)
    )
