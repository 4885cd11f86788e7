"""Sum of every rank's rows over mailboxes, in one launch and without a barrier.

Scope: sm_90a (run with ranks played on one GPU), sm_100a and sm_103a (compiled); 2 to 16 ranks of one NVLink
domain; rows of a multiple of 8 columns, up to `room` bytes a part; as many local ranks in one launch as the
mailboxes' owner plays. Forms: `one_shot` (everyone gets all parts and adds them), `two_stage` (the owner of a
column adds its parts and sends the sum to all; a rank owns a share of the columns, which `ranks` divide) and
`scatter` (the owner's sums stay with it). Refused: other dtypes, rows whose last axis is not contiguous.

Layout: `part` [L,B,N] bf16 (L local ranks; row strides free, 16-byte aligned); `mailbox` [words] int32, that
of the first local rank; `reach` [R] int64, bytes from there to each rank's mailbox, constant; `control` [L,8]
int32; `out` [L,B,N] bf16 (`scatter`: [L,B,N/R]). A part lies in a mailbox as B x N in order. All blocks of
all local ranks must be on the device at once, because they wait for each other: `blocks` bounds them.

Numerics: parts are added in fp32 by ascending rank and rounded once, so every rank and every form gives the
same bits; -0.0 counts as 0.0; NaN and infinities propagate. Where a peer does not send in time, NaN.

Validation: `tests/k3_decode/collectives/test_models.py` (the protocol), `tests/k3_decode/cute/
test_exchange.py` (the source on overlapping threads of the CPU; words; compilation). On an H200 local slots
played 2, 4, 8 and 16 ranks (`collectives/trial.py`): 10,000 epochs of alternating shapes (1 to 64 rows) and
forms, sleeps in every block and each rank in turn, a launch a rank on streams of their own, early starts,
graph replays and two groups, several epochs behind each late rank, abort, reset and a group made anew gave
every word of the rank-ordered sum, and a wrong epoch was noticed; memcheck and racecheck found nothing (2 and
4 ranks). Between two H200s all of that too, and beside a GPU busy with products (`bundles/h200-ranks`). Never
run between more GPUs than two.
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
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.mailbox import EPOCHS, VECTOR_BYTES, MailboxLayout

if TYPE_CHECKING:
    import torch

__all__ = ["FORMS", "ROLES", "blocks_of", "exchange", "variants"]

FORMS = ("one_shot", "two_stage", "scatter")
THREADS = 128
MOST_BLOCKS = 4 * 132
"""Blocks of 128 threads and 128 registers that an H200 holds at once."""
ROLES = (
    ("part", "activation"), ("mailbox", "mailbox"), ("reach", "weight"), ("control", "state"),
    ("out", "output"), ("launches", "workspace"),
)  # fmt: skip


@cute.kernel
def _exchange_rows(
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
    form: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
    is_single: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, local = cute.arch.block_idx()
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    rows = part.shape[1]
    part_at = ins.byte_address(part) + Int64(local) * part.stride[0] * 2
    out_at = ins.byte_address(out) + Int64(local) * out.stride[0] * 2
    # A thread that has one vector and no more finds its addresses before the previous kernel has ended, and
    # asks for its words together with the control. Threads past the end ask for the last vector.
    mine = bid * THREADS + tid
    v = cutlass.min(mine, rows * width - 1)
    at = part_at + Int64(v // width) * part.stride[1] * 2 + Int64(v % width) * VECTOR_BYTES
    to = out_at + Int64(v // width) * out.stride[1] * 2 + Int64(v % width) * VECTOR_BYTES
    asked = (at,) if is_single else ()
    turn = steps.begin(mail, control, local, limit, room, THREADS, delay_ns, asked)
    state = turn.state
    if cutlass.const_expr(is_single):
        place = Int64(v) * VECTOR_BYTES
        words = steps.canonical_words(turn.words[0])
        if mine < rows * width:
            steps.post_to_all(mail, turn.sent_to + place, words)
        steps.advance(state, turn.tid, turn.blocks)
        steps.delay(state, mail, delay_ns, 1)
        if mine < rows * width:
            parts, missing = steps.collect(turn.parts_at + place, ranks, room, state.limit)
            ins.store_words(to, steps.poisoned_if(steps.sum_in_rank_order(parts), missing))
            steps.rearm(turn.parts_at + place, ranks, room)
            steps.report(state, parts, missing, Int32(0), v, form)
    else:
        _in_turns(
            mail, turn, rows, part_at, part.stride[1], out_at, out.stride[1], ranks, width, room, form,
            delay_ns,
        )  # fmt: skip
    if turn.tid + turn.bid + local == 0:
        steps.count_launch(launches)


@cute.jit
def _in_turns(
    mail: Any,
    turn: Any,
    rows: Int32,
    part_at: Int64,
    part_stride: Int64,
    out_at: Int64,
    out_stride: Int64,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    room: cutlass.Constexpr,
    form: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
):
    """Any form by threads that take as many vectors as there are for them."""
    own = width // ranks
    state, first, step = turn.state, turn.first, turn.step
    for v in cutlass.range(first, rows * width, step, unroll=1):
        row, column = v // width, v % width
        at = part_at + Int64(row) * part_stride * 2 + Int64(column) * VECTOR_BYTES
        words = steps.canonical_words(ins.load_activation(at))
        place = turn.sent_to + Int64(v) * VECTOR_BYTES
        if cutlass.const_expr(form == "one_shot"):
            steps.post_to_all(mail, place, words)
        else:
            steps.post(steps.peer_address(mail, column // own) + place, words)
    steps.advance(state, turn.tid, turn.blocks)
    steps.delay(state, mail, delay_ns, 1)

    if cutlass.const_expr(form == "one_shot"):
        for v in cutlass.range(first, rows * width, step, unroll=1):
            at = turn.parts_at + Int64(v) * VECTOR_BYTES
            parts, missing = steps.collect(at, ranks, room, state.limit)
            total = steps.poisoned_if(steps.sum_in_rank_order(parts), missing)
            row, column = v // width, v % width
            ins.store_words(out_at + Int64(row) * out_stride * 2 + Int64(column) * VECTOR_BYTES, total)
            steps.rearm(at, ranks, room)
            steps.report(state, parts, missing, Int32(0), v, form)
    else:
        sums_at = (EPOCHS * ranks * room) + state.slot * room
        for u in cutlass.range(first, rows * own, step, unroll=1):
            row, column = u // own, u % own
            v = row * width + mail.rank * own + column
            at = turn.parts_at + Int64(v) * VECTOR_BYTES
            parts, missing = steps.collect(at, ranks, room, state.limit)
            total = steps.poisoned_if(steps.canonical_words(steps.sum_in_rank_order(parts)), missing)
            if cutlass.const_expr(form == "two_stage"):
                steps.post_to_all(mail, sums_at + Int64(v) * VECTOR_BYTES, total)
            else:
                ins.store_words(out_at + Int64(row) * out_stride * 2 + Int64(column) * VECTOR_BYTES, total)
            steps.rearm(at, ranks, room)
            steps.report(state, parts, missing, Int32(0), v, form)
        if cutlass.const_expr(form == "two_stage"):
            for v in cutlass.range(first, rows * width, step, unroll=1):
                at = mail.own + sums_at + Int64(v) * VECTOR_BYTES
                sums, missing = steps.collect(at, 1, room, state.limit)
                row, column = v // width, v % width
                ins.store_words(
                    out_at + Int64(row) * out_stride * 2 + Int64(column) * VECTOR_BYTES,
                    steps.poisoned_if(sums[0], missing),
                )
                steps.rearm(at, 1, room)
                steps.report(state, sums, missing, column // own, v, form)


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
    form: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
    is_early: cutlass.Constexpr,
    is_single: cutlass.Constexpr,
):
    _exchange_rows(
        part, mailbox, reach, control, out, launches, first_rank, limit, ranks, width, room, form, delay_ns,
        is_single,
    ).launch(
        grid=(blocks, 1, part.shape[0]),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=4,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=is_early,
    )  # fmt: skip


@cache
def _compile(
    ranks: int,
    width: int,
    room: int,
    form: str,
    delay_ns: int = 0,
    is_early: bool = True,
    is_single: bool = False,
) -> Callable[..., None]:
    """The launch for ranks, 16-byte vectors a row and bytes of room a part; the rest is symbolic."""
    local, rows = cute.sym_int32(), cute.sym_int32()
    columns = width * 8

    def rows_of(width: int) -> Any:
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return make_fake_tensor(BFloat16, (local, rows, width), strides, assumed_align=16)

    compiled: Callable[..., None] = cute.compile(
        _launch,
        rows_of(columns),
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        rows_of(columns // ranks if form == "scatter" else columns),
        steps.fake_launches(),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        ranks,
        width,
        room,
        form,
        delay_ns,
        is_early,
        is_single,
        options="--enable-tvm-ffi",
    )
    return compiled


def blocks_of(vectors: int, local: int) -> int:
    """Blocks of each local rank: one thread a vector while all fit the device at once."""
    return max(1, min(-(-vectors // THREADS), MOST_BLOCKS // local))


def exchange(
    *,
    part: "torch.Tensor",
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    out: "torch.Tensor",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
    form: str = "one_shot",
    sharing: int = 1,
    delay_ns: int = 0,
    in_turns: bool = False,
) -> None:
    """Write the sum over ranks to `out` of every local rank in one launch; `ValueError` out of scope.

    `sharing`: launches of as many ranks share the device, so none may hold a place before its turn;
    `delay_ns`: see `exchange_steps.delay`; `in_turns` is for measurements: the form for threads of several
    vectors where each has one.
    """
    local, rows, columns = part.shape
    if columns % (8 * layout.ranks) or rows * columns * 2 > layout.part_bytes or form not in FORMS:
        raise ValueError(
            f"exchange {form}: {rows} rows of {columns} columns need {rows * columns * 2} bytes of "
            f"{layout.part_bytes}, and 8 x {layout.ranks} ranks must divide the columns"
        )
    width = columns // 8
    blocks = blocks_of(rows * width, local * sharing)
    is_single = form == "one_shot" and not in_turns and blocks * THREADS >= rows * width
    launch = _compile(layout.ranks, width, layout.part_bytes, form, delay_ns, sharing == 1, is_single)
    launch(part, mailbox, reach, control, out, launches, first_rank, limit, blocks)


def variants() -> tuple[Variant, ...]:
    """The sums of K3's hidden rows and latents, at every number of ranks, with room for 64 rows."""
    forms = [(ranks, 7168, form, form == "one_shot") for ranks in (2, 4, 8, 16) for form in FORMS]
    forms += [(ranks, 3584, "one_shot", True) for ranks in (2, 4, 8, 16)]
    forms += [(ranks, 7168, "one_shot", False) for ranks in (2, 16)]
    return tuple(
        Variant(
            op="exchange",
            name=f"exchange_{form}_r{ranks}_d{columns}"
            f"{'_in_turns' if form == 'one_shot' and not is_single else ''}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda key=(ranks, columns // 8, 64 * columns * 2, form, 0, True, is_single): _compile(
                *key
            ),  # type: ignore[misc]
            parameters=ROLES,
            source="cute/exchange.py",
            is_smoke=(ranks, columns, form) == (8, 7168, "one_shot"),
        )
        for ranks, columns, form, is_single in forms
    )
