"""Every rank's rows to every rank (`gather`), or each rank's rows for each other one (`transpose`), in one
launch; nothing is added.

It serves the MoE front (sharded latents and router scores, in one launch), the MoE tail (sharded outputs),
and decode context parallelism (queries of all heads; partial attentions and their sums to the heads' owners).

Scope: sm_90a, sm_100a and sm_103a (the last two compiled only); 2 to 16 ranks; rows of whole 16-byte vectors,
and beside them, if wanted, rows of fp32 (`extra`); up to `room` bytes of both a part.

Layout: all tensors are 4-byte words (int32 views): `part` [L,D,B,W] (L local ranks; D ranks it is meant for,
with `gather` 1) and `extra` [L,D,B,T] fp32, strides free, 16-byte aligned rows of `part`; `out` [L,R,B,W] and
`extra_out` [L,R,B,T] with the source rank second, strides free: the same buffer as `part` may be given where
each rank's columns lie in place. `mailbox`, `reach`, `control` as `exchange`. In a mailbox a part's rows lie
in order, `extra`'s behind them.

Numerics: copies; bf16 -0.0 becomes 0.0 and of fp32 values -4.6e-41 becomes -0.0. Where a peer does not send
in time, NaN (as bf16 and as fp32).

Validation: `tests/k3_decode/cute/test_exchange_parts.py` (source on threads); on an H200 with 2 to 16 played
ranks, and between two H200s, every word was right at 1 to 64 rows (`collectives/trial_fused.py`); memcheck
and racecheck found nothing.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.exchange import THREADS, blocks_of
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.mailbox import VECTOR_BYTES, MailboxLayout
from k3_decode.shapes import K3

if TYPE_CHECKING:
    import torch

__all__ = ["exchange_parts", "variants"]

NAMES = {False: "gather", True: "transpose"}
QUERY_WORDS = (K3.kv_lora + K3.qk_rope) // 2
"""Of one head's query, bf16."""


@cute.kernel
def _exchange_parts(
    part: cute.Tensor,
    extra: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    out: cute.Tensor,
    extra_out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    extra_width: cutlass.Constexpr,
    room: cutlass.Constexpr,
    is_transpose: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
):
    _, _, local = cute.arch.block_idx()
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()

    # Threads take vectors from the front and extra words from the back, in loops of their own: one thread for
    # each while there are enough, and no address of one kind ever meets a register of the other. The first of
    # each is asked for together with the control; threads that have none ask for the last one.
    vectors, words = part.shape[2] * width, part.shape[2] * extra_width
    first, step = bid * THREADS + tid, blocks * THREADS
    last = step - 1 - first
    meant_for = ranks if is_transpose else 1
    at = _vector_of(part, local, cutlass.min(first, vectors - 1), width)
    asked = tuple(at + Int64(peer) * part.stride[1] * 4 for peer in range(meant_for))
    asked_word: tuple[Int64, ...] = ()
    if cutlass.const_expr(extra_width > 0):
        at = _word_of(extra, local, cutlass.min(last, words - 1), extra_width)
        asked_word = tuple(at + Int64(peer) * extra.stride[1] * 4 for peer in range(meant_for))
    turn = steps.begin(mail, control, local, limit, room, THREADS, delay_ns, asked, asked_word)
    state = turn.state

    name = NAMES[is_transpose]
    behind = Int64(vectors) * VECTOR_BYTES
    # Made fit outside the branches, or the loads sink into them.
    fit_vectors = [steps.canonical_words(one) for one in turn.words]
    fit_words = [steps.canonical_fp32(one) for one in turn.single]
    if first < vectors:
        _post_vectors(mail, turn.sent_to + Int64(first) * VECTOR_BYTES, fit_vectors)
    if cutlass.const_expr(extra_width > 0):  # noqa: SIM102 - a test at compile time, one on the device
        if last < words:
            _post_words(mail, turn.sent_to + behind + Int64(last) * 4, fit_words)
    for i in cutlass.range(first + step, vectors, step, unroll=1):
        at = _vector_of(part, local, i, width)
        more = [
            steps.canonical_words(ins.load_activation(at + Int64(peer) * part.stride[1] * 4))
            for peer in range(meant_for)
        ]
        _post_vectors(mail, turn.sent_to + Int64(i) * VECTOR_BYTES, more)
    if cutlass.const_expr(extra_width > 0):
        for j in cutlass.range(last + step, words, step, unroll=1):
            at = _word_of(extra, local, j, extra_width)
            rest = [
                steps.canonical_fp32(ins.load_activation_word(at + Int64(peer) * extra.stride[1] * 4))
                for peer in range(meant_for)
            ]
            _post_words(mail, turn.sent_to + behind + Int64(j) * 4, rest)
    steps.advance(state, turn.tid, turn.blocks)
    steps.delay(state, mail, delay_ns, 1)

    for i in cutlass.range(first, vectors, step, unroll=1):
        at = turn.parts_at + Int64(i) * VECTOR_BYTES
        parts, missing = steps.collect(at, ranks, room, state.limit)
        to = _vector_of(out, local, i, width)
        for source in cutlass.range_constexpr(ranks):
            vector = steps.poisoned_if(parts[source], missing)
            ins.store_words(to + Int64(source) * out.stride[1] * 4, vector)
        steps.rearm(at, ranks, room)
        steps.report(state, parts, missing, Int32(0), i, name)
    if cutlass.const_expr(extra_width > 0):
        for j in cutlass.range(last, words, step, unroll=1):
            at = turn.parts_at + behind + Int64(j) * 4
            values, missing = steps.collect_word(at, ranks, room, state.limit)
            to = _word_of(extra_out, local, j, extra_width)
            for source in cutlass.range_constexpr(ranks):
                word = frag.choose_word(missing, Int32(steps.NAN_WORD), values[source])
                ins.store_word(to + Int64(source) * extra_out.stride[1] * 4, word)
            steps.rearm_word(at, ranks, room)
            steps.report(state, [(value,) for value in values], missing, Int32(0), vectors + j // 4, name)
    if turn.tid + turn.bid + local == 0:
        steps.count_launch(launches)


def _vector_of(tensor: cute.Tensor, local: Int32, i: Int32, width: int) -> Int64:
    """Device address of a local rank's 16-byte vector `i`."""
    return _place(tensor, local, i // width) + Int64(i % width) * VECTOR_BYTES


def _word_of(tensor: cute.Tensor, local: Int32, i: Int32, width: int) -> Int64:
    """Device address of a local rank's word `i`."""
    return _place(tensor, local, i // width) + Int64(i % width) * 4


def _post_vectors(mail: Any, place: Int64, vectors: list[ins.Words]) -> None:
    """The same vector to every rank, or to each its own."""
    for peer, base in enumerate(mail.peers):
        steps.post(base + place, vectors[peer % len(vectors)])


def _post_words(mail: Any, place: Int64, words: list[Int32]) -> None:
    """The same fp32 value to every rank, or to each its own."""
    for peer, base in enumerate(mail.peers):
        steps.post_word(base + place, words[peer % len(words)], Int32(1))


def _place(tensor: cute.Tensor, local: Int32, row: Int32) -> Int64:
    """Device address of a row of a local rank's part, for or from rank 0."""
    base = ins.byte_address(tensor)
    return base + Int64(local) * tensor.stride[0] * 4 + Int64(row) * tensor.stride[2] * 4


@cute.jit
def _launch(
    part: cute.Tensor,
    extra: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    out: cute.Tensor,
    extra_out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    blocks: Int32,
    stream: Any,
    ranks: cutlass.Constexpr,
    width: cutlass.Constexpr,
    extra_width: cutlass.Constexpr,
    room: cutlass.Constexpr,
    is_transpose: cutlass.Constexpr,
    delay_ns: cutlass.Constexpr,
    is_early: cutlass.Constexpr,
):
    _exchange_parts(
        part, extra, mailbox, reach, control, out, extra_out, launches, first_rank, limit, ranks, width,
        extra_width, room, is_transpose, delay_ns,
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
    extra_width: int,
    room: int,
    is_transpose: bool,
    delay_ns: int = 0,
    is_early: bool = True,
) -> Callable[..., None]:
    """The launch for 16-byte vectors and fp32 values a row; local ranks, rows and strides stay symbolic."""
    local, rows = cute.sym_int32(), cute.sym_int32()

    def words(ranks: int, width: int, align: int) -> Any:
        strides = (*(cute.sym_int64(divisibility=align // 4) for _ in range(3)), 1)
        return make_fake_tensor(Int32, (local, ranks, rows, max(width, 1)), strides, assumed_align=align)

    meant_for = ranks if is_transpose else 1
    compiled: Callable[..., None] = cute.compile(
        _launch,
        words(meant_for, width * 4, 16),
        words(meant_for, extra_width, 4),
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        words(ranks, width * 4, 16),
        words(ranks, extra_width, 4),
        steps.fake_launches(),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        ranks,
        width,
        extra_width,
        room,
        is_transpose,
        delay_ns,
        is_early,
        options="--enable-tvm-ffi",
    )
    return compiled


def exchange_parts(
    *,
    part: "torch.Tensor",
    extra: "torch.Tensor | None",
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    out: "torch.Tensor",
    extra_out: "torch.Tensor | None",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
    sharing: int = 1,
    delay_ns: int = 0,
) -> None:
    """Write what every rank sent to `out` (and `extra_out`), in one launch; `ValueError` if out of scope.

    Tensors are int32 views, see the module; `sharing` and `delay_ns` as in `exchange`.
    """
    local, meant_for, rows, words = part.shape
    is_transpose = meant_for > 1
    extra_width = 0 if extra is None else extra.shape[3]
    size = rows * (words + extra_width) * 4
    if words % 4 or size > layout.part_bytes or (is_transpose and meant_for != layout.ranks):
        raise ValueError(
            f"exchange_parts: {rows} rows of {words} + {extra_width} words need {size} bytes of "
            f"{layout.part_bytes}; rows are whole vectors of 4 words, meant for 1 or {layout.ranks} ranks"
        )
    launch = _compile(
        layout.ranks, words // 4, extra_width, layout.part_bytes, is_transpose, delay_ns, sharing == 1
    )
    # A tensor that is not there is never touched; the kernel takes any of its shape in its place.
    extra_in = part[..., :1] if extra is None else extra
    extra_to = out[..., :1] if extra_out is None else extra_out
    blocks = blocks_of(rows * (words // 4 + extra_width), local * sharing)
    launch(
        part, extra_in, mailbox, reach, control, out, extra_to, launches, first_rank, limit, blocks
    )  # fmt: skip


def variants() -> tuple[Variant, ...]:
    """The MoE front, the MoE tail's distribution, and queries and partials of decode context parallelism."""
    roles = (
        ("part", "activation"), ("extra", "activation"), ("mailbox", "mailbox"), ("reach", "weight"),
        ("control", "state"), ("out", "output"), ("extra_out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    found = []
    for ranks in (2, 8, 16):
        heads = K3.heads // ranks
        forms = {
            "moe_front": (K3.latent // ranks // 8, K3.experts // ranks, False),
            "moe_tail": (K3.hidden // ranks // 8, 0, False),
            "dcp_query": (heads * QUERY_WORDS // 4, 0, False),
            "dcp_partials": (heads * K3.kv_lora // 8, heads, True),
        }
        for name, (width, extra_width, is_transpose) in forms.items():
            key = (ranks, width, extra_width, 64 * (width * 16 + extra_width * 4), is_transpose)
            found.append(
                Variant(
                    op="exchange",
                    name=f"exchange_parts_{name}_r{ranks}",
                    architectures=DISPATCHED + COMPILED,
                    compile=lambda key=key: _compile(*key),  # type: ignore[misc]
                    parameters=roles,
                    source="cute/exchange_parts.py",
                )
            )
    return tuple(found)
