"""The one-shot exchange where the fabric multicasts: one store reaches every rank's mailbox.

A capability for machines that have it, compiled and audited; it was never run, and nothing dispatches it.
`exchange` serves every other machine, with a store to each peer, and gives the same bits.

Scope: sm_90a, sm_100a and sm_103a (compiled); 2 to 16 ranks of one NVLink domain whose memory handle has a
multicast address. The launch refuses a group without one. Rows and room as `exchange`.

Layout: as `exchange`; `multicast` int32 [words] is the address at which a store goes to the same place of all
mailboxes, `mailbox` this rank's own, from which it reads.

Numerics: as `exchange`: fp32 in rank order, rounded once; -0.0 counts as 0.0; NaN where a peer is missing.

Validation: compilation and audit only.
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

if TYPE_CHECKING:
    import torch

__all__ = ["exchange_multicast", "variants"]

NAME = "one_shot"


@cute.kernel
def _exchange_multicast(
    part: cute.Tensor,
    multicast: cute.Tensor,
    mailbox: cute.Tensor,
    control: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    rank: Int32,
    limit: Int32,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    # No peer is ever stored to by itself, so only the own mailbox has an address here.
    own = ins.byte_address(mailbox)
    mail = steps.Mail(ranks, rank, [], own, own, Int64(0))
    turn = steps.begin(mail, control, Int32(0), limit, room, THREADS, 0)
    state, first, step = turn.state, turn.first, turn.step
    rows = part.shape[0]
    sent_to = ins.byte_address(multicast) + turn.sent_to
    for v in cutlass.range(first, rows * width, step, unroll=1):
        at = ins.byte_address(part) + Int64(v // width) * part.stride[0] * 2 + Int64(v % width) * VECTOR_BYTES
        _post_to_all(sent_to + Int64(v) * VECTOR_BYTES, steps.canonical_words(ins.load_activation(at)))
    steps.advance(state, turn.tid, turn.blocks)
    for v in cutlass.range(first, rows * width, step, unroll=1):
        at = turn.parts_at + Int64(v) * VECTOR_BYTES
        parts, missing = steps.collect(at, ranks, room, state.limit)
        total = steps.poisoned_if(steps.sum_in_rank_order(parts), missing)
        to = ins.byte_address(out) + Int64(v // width) * out.stride[0] * 2 + Int64(v % width) * VECTOR_BYTES
        ins.store_words(to, total)
        steps.rearm(at, ranks, room)
        steps.report(state, parts, missing, Int32(0), v, NAME)
    if turn.tid + turn.bid == 0:
        steps.count_launch(launches)


def _post_to_all(address: Int64, words: ins.Words) -> None:
    """16 bytes to the same place of every mailbox, by one store."""
    template = (
        "{.reg .f32 a, b, c, d; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; "
        "multimem.st.relaxed.sys.global.v4.f32 [$0], {a, b, c, d};}"
    )
    ins.asm(template, "l,r,r,r,r", [address, *words])


@cute.jit
def _launch(
    part: cute.Tensor,
    multicast: cute.Tensor,
    mailbox: cute.Tensor,
    control: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    rank: Int32,
    limit: Int32,
    blocks: Int32,
    stream: Any,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    _exchange_multicast(
        part, multicast, mailbox, control, out, launches, rank, limit, ranks, width, room
    ).launch(
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=4,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )


@cache
def _compile(ranks: int, width: int, room: int) -> Callable[..., None]:
    """The launch for ranks, 16-byte vectors a row and bytes of room a part; the rest is symbolic."""
    rows = cute.sym_int32()

    def words() -> Any:
        return make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=16)

    def row_tensor() -> Any:
        strides = (cute.sym_int64(divisibility=8), 1)
        return make_fake_tensor(BFloat16, (rows, width * 8), strides, assumed_align=16)

    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_tensor(),
        words(),
        words(),
        steps.fake_control(),
        row_tensor(),
        steps.fake_launches(),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        ranks,
        width,
        room,
        options="--enable-tvm-ffi",
    )
    return compiled


def exchange_multicast(
    *,
    part: "torch.Tensor",
    multicast: "torch.Tensor | None",
    mailbox: "torch.Tensor",
    control: "torch.Tensor",
    out: "torch.Tensor",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
) -> None:
    """Write the sum over ranks of `part` [B,N] to `out`; `ValueError` out of scope or without multicast."""
    rows, columns = part.shape
    if multicast is None:
        raise ValueError("exchange_multicast: the group has no multicast address; use `exchange`")
    if columns % 8 or rows * columns * 2 > layout.part_bytes:
        raise ValueError(
            f"exchange_multicast: {rows} rows of {columns} columns need {rows * columns * 2} bytes of "
            f"{layout.part_bytes}, in whole vectors of 8"
        )
    launch = _compile(layout.ranks, columns // 8, layout.part_bytes)
    blocks = blocks_of(rows * columns // 8, 1)
    launch(part, multicast, mailbox, control, out, launches, first_rank, limit, blocks)


def variants() -> tuple[Variant, ...]:
    """K3's hidden rows at the sizes that a domain with multicast serves."""
    roles = (
        ("part", "activation"), ("multicast", "mailbox"), ("mailbox", "mailbox"), ("control", "state"),
        ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="exchange",
            name=f"exchange_multicast_r{ranks}_d7168",
            architectures=DISPATCHED + COMPILED,
            compile=lambda key=(ranks, 896, 64 * 7168 * 2): _compile(*key),  # type: ignore[misc]
            parameters=roles,
            source="cute/exchange_multicast.py",
            expected=(("max_multicast", 1),),
        )
        for ranks in (8, 16)
    )
