"""The other protocol, to be measured beside `cute/exchange.py`: plain words, and a flag a block and rank.

A block stores its vectors into every mailbox, meets, and raises its flag at every rank with a release at
system scope; it waits with an acquire for the same block's flag of every rank and then reads plain words.
Flags hold the epoch, so nobody lowers them, and a block's flag is raised by the same block of a peer alone,
whatever the shape, as all ranks launch the same grid in an epoch. They lie where the two-stage form of the
other protocol keeps its sums; words lie in slots by epoch as there, without marks, so a group serves one of
the two protocols and never both. Order and result are `exchange`'s one-shot form's, -0.0 kept.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.exchange import MOST_BLOCKS, THREADS, blocks_of
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.ops.mailbox import EPOCHS, VECTOR_BYTES, MailboxLayout

__all__ = ["exchange_flags"]


@cute.kernel
def _exchange_by_flags(
    part: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    _, _, local = cute.arch.block_idx()
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    turn = steps.begin(mail, control, local, limit, room, THREADS, 0)
    state, first, step = turn.state, turn.first, turn.step
    vectors = part.shape[1] * width
    part_at = ins.byte_address(part) + Int64(local) * part.stride[0] * 2
    out_at = ins.byte_address(out) + Int64(local) * out.stride[0] * 2
    for v in cutlass.range(first, vectors, step, unroll=1):
        at = part_at + Int64(v // width) * part.stride[1] * 2 + Int64(v % width) * VECTOR_BYTES
        steps.post_to_all(mail, turn.sent_to + Int64(v) * VECTOR_BYTES, ins.load_activation(at))
    steps.advance(state, turn.tid, turn.blocks)

    flags_at, raised = EPOCHS * ranks * room, state.epoch + 1
    if turn.tid < ranks:
        there = steps.peer_address(mail, turn.tid)
        place = flags_at + (Int64(mail.rank) * MOST_BLOCKS + Int64(turn.bid)) * 4
        ins.asm("st.release.sys.global.b32 [$0], $1;", "l,r", [there + place, raised])
    absent = Int32(0)
    marks = []
    for source in cutlass.range_constexpr(ranks):
        at = mail.own + flags_at + (Int64(source * MOST_BLOCKS) + Int64(turn.bid)) * 4
        missing = _await_flag(at, raised, state.limit)
        absent = absent | missing
        marks.append((frag.choose_word(missing, Int32(steps.MARK), Int32(0)),))
    steps.report(state, marks, absent, Int32(0), first, "flags")
    for v in cutlass.range(first, vectors, step, unroll=1):
        at = turn.parts_at + Int64(v) * VECTOR_BYTES
        parts = [_arrived(at + source * room) for source in range(ranks)]
        total = steps.poisoned_if(steps.sum_in_rank_order(parts), absent)
        to = out_at + Int64(v // width) * out.stride[1] * 2 + Int64(v % width) * VECTOR_BYTES
        ins.store_words(to, total)
    if turn.tid + turn.bid + local == 0:
        steps.count_launch(launches)


def _await_flag(address: Int64, raised: Int32, limit: Int32) -> Int32:
    """0 when the flag has come to `raised`, 1 after `limit` looks without."""
    template = (
        "{.reg .pred p, q; .reg .b32 f, n; mov.b32 n, $3; AGAIN: ld.acquire.sys.global.b32 f, [$1]; "
        "setp.ge.s32 p, f, $2; @p bra DONE; sub.s32 n, n, 1; setp.gt.s32 q, n, 0; @q bra AGAIN; "
        "DONE: selp.b32 $0, 0, 1, p;}"
    )
    return ins.asm(template, "=r,l,r,r", [address, raised, limit], [Int32])


def _arrived(address: Int64) -> ins.Words:
    template = "ld.relaxed.sys.global.v4.b32 {$0,$1,$2,$3}, [$4];"
    words: ins.Words = ins.asm(template, "=r,=r,=r,=r,l", [address], [Int32] * 4)
    return words


@cute.jit
def _launch(
    part: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    blocks: Int32,
    stream: Any,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    _exchange_by_flags(
        part, mailbox, reach, control, out, launches, first_rank, limit, ranks, width, room
    ).launch(
        grid=(blocks, 1, part.shape[0]),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=4,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )


@cache
def _compile(ranks: int, width: int, room: int) -> Callable[..., None]:
    """The launch for ranks, 16-byte vectors a row and bytes of room a part; the rest is symbolic."""
    local, rows = cute.sym_int32(), cute.sym_int32()

    def row_tensor() -> Any:
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return make_fake_tensor(BFloat16, (local, rows, width * 8), strides, assumed_align=16)

    compiled: Callable[..., None] = cute.compile(
        _launch, row_tensor(), steps.fake_mailbox(), steps.fake_reach(ranks), steps.fake_control(),
        row_tensor(), steps.fake_launches(), Int32(0), Int32(1), Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True), ranks, width, room, options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


def exchange_flags(
    *,
    part: torch.Tensor,
    mailbox: torch.Tensor,
    reach: torch.Tensor,
    control: torch.Tensor,
    out: torch.Tensor,
    launches: torch.Tensor,
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
) -> None:
    """Write the sum over ranks to `out` of every local rank; `ValueError` where the rows do not fit."""
    local, rows, columns = part.shape
    if columns % 8 or rows * columns * 2 > layout.part_bytes:
        raise ValueError(f"exchange_flags: {rows} rows of {columns} columns beyond {layout.part_bytes} bytes")
    launch = _compile(layout.ranks, columns // 8, layout.part_bytes)
    launch(
        part, mailbox, reach, control, out, launches, first_rank, limit,
        blocks_of(rows * columns // 8, local),
    )  # fmt: skip
