"""All-reduce of the attention's output, attention residual and RMSNorm in one launch: the statistics of the
residual's finished blocks are ready before the peers' words arrive.

Scope: sm_90a, sm_100a and sm_103a (the last two compiled only); 2 to 16 ranks; any row count whose parts fit
a mailbox; 0 to 15 blocks; `hidden` a multiple of 8 times the ranks that `cluster` x 256 divides (`serves`: a
thread without columns would look once, and bring NaN into its warp's sums). Forms: parts
sent by an earlier kernel (`oproj_allreduce`) or by this one (`has_part`); one-shot or two-stage (`exchange`);
the sum is added to the prefix or takes its place (`restarts`, where an AttnRes block begins).

Layout: as `attn_res`, with a leading axis of local ranks: `part` [L,B,H] bf16 (read with `has_part`),
`prefix` [L,B,H] bf16 (written; read unless it restarts), `blocks` [L,B,N,H] bf16, `score_weight` fp32 and
`norm_weight` bf16 [H] (constant, the same for all local ranks), `out` [L,B,H]; `mailbox`, `reach`, `control`
as `exchange`. One cluster a row and local rank; a thread sends, waits for and holds 8 columns. Where several
local ranks share a launch, all its blocks must be on the device at once.

Numerics: the sum as `exchange`, in rank order in fp32, rounded once; then `attn_res` to the bit: every total
is added in the same order, only sooner. Where a peer does not send in time: NaN.

Validation: `tests/k3_decode/cute/test_attn_res_allreduce.py`, `collectives/trial_fused.py`. On an H200, 2, 4,
8 and 16 played ranks: parts sent by it or by `oproj_allreduce`, one-shot and two-stage, with a restart, with
0, 1, 4 and 8 blocks, at 1 to 24 rows a rank: output and prefix have the bits of projection, rank-ordered sum
and `attn_res`; memcheck and racecheck found nothing (2 and 4 ranks). Between two H200s: the same
at 1 to 64 rows.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.attn_res import cluster_of, slots_of
from k3_decode.cute.reduction import lane_slot, lane_sums, warp_sum
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.ops.mailbox import EPOCHS, VECTOR_BYTES, MailboxLayout

if TYPE_CHECKING:
    import torch

__all__ = ["attn_res_allreduce", "serves", "variants"]

VECTOR = 8
"""Columns a thread holds."""
MOST_THREADS = 132 * 384
"""Threads of 128 registers in clusters that an H200 holds at once: three quarters of what fits without."""


@cute.kernel
def _reduce_and_mix(
    part: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    prefix: cute.Tensor,
    blocks: cute.Tensor,
    score_weight: cute.Tensor,
    norm_weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    write_index: Int32,
    eps: Float32,
    form: cutlass.Constexpr,
):
    hidden, count, has_part, is_two_stage, restarts, cluster, ranks, room = form
    tid, _, _ = cute.arch.thread_idx()
    bid, _, local = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    vectors = hidden // VECTOR // cluster
    warps = (vectors + 31) // 32
    row, block = bid // cluster, bid % cluster
    lane, warp = tid % 32, tid // 32
    slots = slots_of(count)
    name = "attn_res_two_stage" if is_two_stage else "attn_res"

    sums = cute.arch.alloc_smem(Float32, cluster * warps * slots, 16)
    squares = cute.arch.alloc_smem(Float32, cluster * warps, 16)
    barriers = cute.arch.alloc_smem(Int64, 2, 8)
    sums_at, squares_at, barriers_at = sums.toint(), squares.toint(), barriers.toint()
    if cutlass.const_expr(cluster > 1):  # noqa: SIM102 - a test at compile time, one on the device
        if tid == 0:
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + 1, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, cluster * warps * 2 * (count + 1) * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + 1, cluster * warps * 4)

    # Threads past the row's end repeat the last vector, send nothing, and their sums are dropped.
    is_inside = tid < vectors
    column = block * vectors + cutlass.min(tid, vectors - 1)
    offset = Int64(column) * VECTOR_BYTES
    mail = steps.open_mail(mailbox, reach, first_rank + local, ranks)
    prefix_at = _row_of(prefix, local, row) + offset
    blocks_at = _row_of(blocks, local, row) + offset
    block_bytes = blocks.stride[2] * 2
    weights = ()
    if cutlass.const_expr(count > 0):
        weight_at = ins.byte_address(score_weight) + Int64(column) * (VECTOR * 4)
        weights = ins.load_weight_f32(weight_at) + ins.load_weight_f32(weight_at + 16)
    norms = ins.load_weight(ins.byte_address(norm_weight) + offset)
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    words = (Int32(0),) * 4
    if cutlass.const_expr(has_part):
        # On its way together with the control.
        words = ins.load_activation(_row_of(part, local, row) + offset)
    state = steps.enter(control, local, limit)
    own = hidden // VECTOR // ranks
    v = row * (hidden // VECTOR) + column
    place = Int64(v) * VECTOR_BYTES
    if cutlass.const_expr(has_part):
        words = steps.canonical_words(words)
        sent_to = state.slot * (ranks * room) + Int64(mail.rank) * room + place
        if is_inside:
            if cutlass.const_expr(is_two_stage):
                steps.post(steps.peer_address(mail, column // own) + sent_to, words)
            else:
                steps.post_to_all(mail, sent_to, words)
    sources = [ins.load_activation(blocks_at + block_bytes * i) for i in range(count)]
    mine = Float32(1.0) if is_inside else Float32(0.0)
    if cutlass.const_expr(count > 0):
        total = lane_sums(_statistics(sources, weights, mine, slots), lane)
        slot = lane_slot(lane, slots)
        if lane % (32 // slots) == 0 and slot % (slots // 2) < count:
            _publish(sums_at + ((block * warps + warp) * slots + slot) * 4, total, barriers_at, cluster)
    old = (Int32(0),) * 4
    if cutlass.const_expr(not restarts):
        old = ins.load_activation(prefix_at)
    steps.advance(state, tid, grid)

    looks = frag.choose_word(Int32(is_inside), state.limit, Int32(0))
    parts_at = steps.arrived(mail, state, room) + place
    delta = (Int32(0),) * 4
    if cutlass.const_expr(is_two_stage):
        sums_of = EPOCHS * ranks * room + state.slot * room + place
        if is_inside and column // own == mail.rank:
            parts, absent = steps.collect(parts_at, ranks, room, looks)
            added = steps.canonical_words(steps.sum_in_rank_order(parts))
            steps.post_to_all(mail, sums_of, steps.poisoned_if(added, absent))
            steps.rearm(parts_at, ranks, room)
            steps.report(state, parts, absent, Int32(0), v, name)
        arrived, missing = steps.collect(mail.own + sums_of, 1, room, looks)
        delta = steps.poisoned_if(arrived[0], missing)
        if is_inside:
            steps.rearm(mail.own + sums_of, 1, room)
            steps.report(state, arrived, missing, column // own, v, name)
    else:
        parts, missing = steps.collect(parts_at, ranks, room, looks)
        delta = steps.poisoned_if(steps.sum_in_rank_order(parts), missing)
        if is_inside:
            steps.rearm(parts_at, ranks, room)
            steps.report(state, parts, missing, Int32(0), v, name)

    new = delta
    if cutlass.const_expr(not restarts):
        new = _add_words(old, delta)
    if is_inside:
        ins.store_words(prefix_at, new)
    if is_inside and write_index >= 0:
        ins.store_words(blocks_at + block_bytes * write_index, new)
    mixed = steps.floats(new)
    if cutlass.const_expr(count > 0):
        square, dot = _statistic(new, weights, mine)
        square, dot = warp_sum(square), warp_sum(dot)
        if lane == 0:
            first = sums_at + ((block * warps + warp) * slots + count) * 4
            _publish(first, square, barriers_at, cluster)
            _publish(first + slots // 2 * 4, dot, barriers_at, cluster)
        if cutlass.const_expr(cluster > 1):
            cute.arch.mbarrier_wait(barriers, 0)
        else:
            cute.arch.sync_threads()
        source = cutlass.min(lane, count)
        square, dot = Float32(0.0), Float32(0.0)
        for w in cutlass.range_constexpr(cluster * warps):
            square = square + ins.shared_load_f32(sums_at + (w * slots + source) * 4)
            dot = dot + ins.shared_load_f32(sums_at + (w * slots + slots // 2 + source) * 4)
        score = dot * cute.rsqrt(square * (1.0 / hidden) + eps)
        scores = [cute.arch.shuffle_sync(score, i) for i in range(count + 1)]
        top = scores[0]
        for i in cutlass.range_constexpr(count):
            top = cute.arch.fmax(top, scores[i + 1])
        shares = [cute.exp(s - top) for s in scores]
        whole = shares[0]
        for i in cutlass.range_constexpr(count):
            whole = whole + shares[i + 1]
        scale = 1.0 / whole
        mixed = _mix([s * scale for s in shares], [*sources, new])

    square = Float32(0.0)
    for j in cutlass.range_constexpr(VECTOR):
        square = square + mixed[j] * mixed[j]
    square = warp_sum(square * mine)
    if cutlass.const_expr(cluster > 1):
        if lane < cluster:
            there = ins.cluster_address(squares_at + (block * warps + warp) * 4, lane)
            ins.store_remote_f32(there, square, ins.cluster_address(barriers_at + 8, lane))
        cute.arch.mbarrier_wait(barriers + 1, 0)
    else:
        if lane == 0:
            ins.shared_store_f32(squares_at + warp * 4, square)
        cute.arch.sync_threads()
    square = Float32(0.0)
    for w in cutlass.range_constexpr(cluster * warps):
        square = square + ins.shared_load_f32(squares_at + w * 4)
    scale = cute.rsqrt(square * (1.0 / hidden) + eps)
    if is_inside:
        y = [m * scale * w for m, w in zip(mixed, steps.floats(norms), strict=True)]
        normed = tuple(ins.pack_halves(y[i], y[i + 1]) for i in range(0, VECTOR, 2))
        ins.store_words(_row_of(out, local, row) + offset, normed)
    if tid + bid + local == 0:
        steps.count_launch(launches)


def _row_of(tensor: cute.Tensor, local: Int32, row: Int32) -> Int64:
    """Device address of a local rank's row of a bf16 tensor."""
    base = ins.byte_address(tensor)
    return base + Int64(local) * tensor.stride[0] * 2 + Int64(row) * tensor.stride[1] * 2


def _publish(place: Int32, value: Float32, barriers_at: Int32, cluster: int) -> None:
    """One sum to the same place of every block of the cluster."""
    if cluster == 1:
        ins.shared_store_f32(place, value)
        return
    for peer in range(cluster):
        there = ins.cluster_address(place, Int32(peer))
        ins.store_remote_f32(there, value, ins.cluster_address(barriers_at, Int32(peer)))


def _statistic(words: ins.Words, weights: tuple[Float32, ...], mine: Float32) -> tuple[Float32, Float32]:
    """A source's sum of squares and score product over the thread's columns."""
    square, dot = Float32(0.0), Float32(0.0)
    for x, w in zip(steps.floats(words), weights, strict=True):
        square = square + x * x
        dot = dot + x * w
    return square * mine, dot * mine


def _statistics(
    sources: list[ins.Words], weights: tuple[Float32, ...], mine: Float32, slots: int
) -> list[Float32]:
    """Those of the blocks, in `attn_res`'s places; the prefix's are still zero."""
    values = [Float32(0.0)] * slots
    for i, words in enumerate(sources):
        values[i], values[slots // 2 + i] = _statistic(words, weights, mine)
    return values


def _add_words(left: ins.Words, right: ins.Words) -> ins.Words:
    sums = [x + y for x, y in zip(steps.floats(left), steps.floats(right), strict=True)]
    return tuple(ins.pack_halves(sums[i], sums[i + 1]) for i in range(0, VECTOR, 2))


def _mix(shares: list[Float32], sources: list[ins.Words]) -> list[Float32]:
    mixed = [Float32(0.0)] * VECTOR
    for share, words in zip(shares, sources, strict=True):
        mixed = [m + share * x for m, x in zip(mixed, steps.floats(words), strict=True)]
    return mixed


@cute.jit
def _launch(
    part: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    prefix: cute.Tensor,
    blocks: cute.Tensor,
    score_weight: cute.Tensor,
    norm_weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    first_rank: Int32,
    limit: Int32,
    write_index: Int32,
    eps: Float32,
    stream: Any,
    form: cutlass.Constexpr,
):
    hidden, cluster = form[0], form[5]
    threads = (hidden // VECTOR // cluster + 31) // 32 * 32
    _reduce_and_mix(
        part, mailbox, reach, control, prefix, blocks, score_weight, norm_weight, out, launches, first_rank,
        limit, write_index, eps, form,
    ).launch(
        grid=(prefix.shape[1] * cluster, 1, prefix.shape[0]),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        min_blocks_per_mp=max(1, 512 // threads),
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


@cache
def _compile(
    hidden: int,
    count: int,
    has_part: bool,
    is_two_stage: bool,
    restarts: bool,
    cluster: int,
    ranks: int,
    room: int,
) -> Callable[..., None]:
    """The launch for one form; local ranks, rows and strides stay symbolic."""
    local, rows, entries = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()

    def strides(count: int) -> tuple[Any, ...]:
        return (*(cute.sym_int64(divisibility=8) for _ in range(count)), 1)

    def row_tensor() -> Any:
        return make_fake_tensor(BFloat16, (local, rows, hidden), strides(2), assumed_align=16)

    blocks = make_fake_tensor(BFloat16, (local, rows, entries, hidden), strides(3), assumed_align=16)
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_tensor(),
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        row_tensor(),
        blocks,
        make_fake_tensor(Float32, (hidden,), (1,), assumed_align=16),
        make_fake_tensor(BFloat16, (hidden,), (1,), assumed_align=16),
        row_tensor(),
        steps.fake_launches(),
        Int32(0),
        Int32(1),
        Int32(-1),
        Float32(1e-5),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        (hidden, count, has_part, is_two_stage, restarts, cluster, ranks, room),
        options="--enable-tvm-ffi",
    )
    return compiled


def serves(hidden: int) -> bool:
    """Whether rows of so many columns fill whole warps at any number of rows."""
    return all(hidden % (VECTOR * 32 * cluster_of(hidden, rows)) == 0 for rows in (1, 32))


def attn_res_allreduce(
    *,
    part: "torch.Tensor | None",
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    prefix: "torch.Tensor",
    blocks: "torch.Tensor",
    blocks_read: int,
    write_index: int,
    score_weight: "torch.Tensor",
    norm_weight: "torch.Tensor",
    out: "torch.Tensor",
    eps: float,
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
    is_two_stage: bool = False,
    restarts: bool = False,
) -> None:
    """Add the ranks' parts, update `prefix` (and `blocks[:, :, write_index]`), write the normed mix to `out`.

    Without `part` an earlier kernel has sent it, in the same form. `ValueError` if out of scope.
    """
    local, rows, hidden = prefix.shape
    if not 0 <= blocks_read <= min(15, blocks.shape[2]):
        raise ValueError(
            f"attn_res_allreduce: blocks_read {blocks_read} outside 0..{min(15, blocks.shape[2])}"
        )
    if rows * hidden * 2 > layout.part_bytes or hidden % (8 * layout.ranks):
        raise ValueError(
            f"attn_res_allreduce: {rows} rows of {hidden} columns need {rows * hidden * 2} bytes of "
            f"{layout.part_bytes}, and 8 x {layout.ranks} ranks must divide the columns"
        )
    if not serves(hidden):
        raise ValueError(
            f"attn_res_allreduce: {hidden} columns do not fill whole warps; exchange and add apart"
        )
    if local > 1 and local * rows * (hidden // VECTOR) > MOST_THREADS:
        raise ValueError(
            f"attn_res_allreduce: {local} local ranks of {rows} rows do not fit a device at once"
        )
    launch = _compile(
        hidden, blocks_read, part is not None, is_two_stage, restarts, cluster_of(hidden, rows),
        layout.ranks, layout.part_bytes,
    )  # fmt: skip
    launch(
        prefix if part is None else part, mailbox, reach, control, prefix, blocks, score_weight, norm_weight,
        out, launches, first_rank, limit, write_index, eps,
    )  # fmt: skip


def variants() -> tuple[Variant, ...]:
    """K3's forms, with room for 64 rows."""
    roles = (
        ("part", "activation"), ("mailbox", "mailbox"), ("reach", "weight"), ("control", "state"),
        ("prefix", "state"), ("blocks", "state"), ("score_weight", "weight"), ("norm_weight", "weight"),
        ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    room = 64 * 7168 * 2
    forms = [
        (7168, 4, has_part, is_two_stage, False, 7, ranks, room)
        for ranks in (2, 8, 16)
        for has_part in (False, True)
        for is_two_stage in (False, True)
    ]
    forms += [(7168, 8, False, False, False, 7, 8, room)]
    forms += [(7168, 1, has_part, False, True, 7, 8, room) for has_part in (False, True)]
    return tuple(
        Variant(
            op="exchange",
            name=f"attn_res_allreduce_r{form[6]}_n{form[1]}{'_send' if form[2] else ''}"
            f"{'_two_stage' if form[3] else ''}{'_restart' if form[4] else ''}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=form: _compile(*form),  # type: ignore[misc]
            parameters=roles,
            source="cute/attn_res_allreduce.py",
            max_cluster=form[5],
        )
        for form in forms
    )
