"""Output projection whose rows go straight to the peers' mailboxes: the sending half of the fused all-reduce.

Scope: as `projection` (1 to 64 rows of x, K a multiple of 32), 2 to 16 ranks; sm_90a, sm_100a and sm_103a
(the last two compiled only). One launch serves one rank. `attn_res_allreduce` without a part receives, in the
same form and as the group's next launch; it counts the epoch, so nothing else of the group may come between.

Layout: `x` [B,K] bf16, `weight` [M,K] bf16 as `projection`; `mailbox`, `reach` as `exchange`, `control` [1,8]
of the rank (read). Nothing is written but mailboxes: a finished pair of columns is one word, sent to every
rank (`one_shot`) or to the pair's owner (`two_stage`).

Numerics: as `projection`, rounded to bf16 once; -0.0 is sent as 0.0.

Validation: with its receiver, see `attn_res_allreduce`.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import instructions as ins
from k3_decode.cute import row_product
from k3_decode.cute.plans import has_warpgroups, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Finished
from k3_decode.cute.variant import Variant
from k3_decode.ops.mailbox import MailboxLayout
from k3_decode.shapes import K3

if TYPE_CHECKING:
    import torch

__all__ = ["compile_plan", "oproj_allreduce", "variants"]


@cute.kernel
def _project_and_send(
    x: cute.Tensor,
    weight: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    launches: cute.Tensor,
    rank: Int32,
    plan: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    room: cutlass.Constexpr,
    is_two_stage: cutlass.Constexpr,
):
    segments = [(ins.byte_address(weight), weight.shape[0])]
    counter = ins.byte_address(launches) + steps.LAUNCH_PLACE * 4
    send = _Sender(mailbox, reach, control, rank, weight.shape[0], ranks, room, is_two_stage)
    row_product.multiply(plan, segments, x, send, counter)


class _Sender:
    """What sends a finished pair. Mailboxes are looked up when the first pair is ready, which is after the
    wait on the previous kernel, and so that no register holds them while weights stream.
    """

    def __init__(
        self, mailbox: Any, reach: Any, control: Any, rank: Int32, columns: Int32, ranks: int, room: int,
        is_two_stage: bool,
    ) -> None:  # fmt: skip
        self.mailbox, self.reach, self.control, self.rank = mailbox, reach, control, rank
        self.columns, self.ranks, self.room, self.is_two_stage = columns, ranks, room, is_two_stage
        self.found: tuple[steps.Mail, Int64] | None = None

    def __call__(self, pair: Finished) -> None:
        if self.found is None:
            mail = steps.open_mail(self.mailbox, self.reach, self.rank, self.ranks)
            state = steps.enter(self.control, Int32(0), Int32(1))
            self.found = mail, state.slot * (self.ranks * self.room) + Int64(self.rank) * self.room
        mail, sent_to = self.found
        word = steps.canonical(ins.pack_halves(pair.low, pair.high))
        place = sent_to + (Int64(pair.token) * self.columns + Int64(pair.row)) * 2
        if self.is_two_stage:
            # Rows past the last one have no owner; they are not sent, and their address is never used.
            owner = ins.at_most(pair.row // (self.columns // self.ranks), Int32(self.ranks - 1))
            steps.post_word(steps.peer_address(mail, owner) + place, word, pair.is_wanted)
        else:
            for peer in mail.peers:
                steps.post_word(peer + place, word, pair.is_wanted)


@cute.jit
def _launch(
    x: cute.Tensor,
    weight: cute.Tensor,
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    control: cute.Tensor,
    launches: cute.Tensor,
    rank: Int32,
    stream: Any,
    plan: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    room: cutlass.Constexpr,
    is_two_stage: cutlass.Constexpr,
):
    _project_and_send(
        x, weight, mailbox, reach, control, launches, rank, plan, ranks, room, is_two_stage
    ).launch(**row_product.launch_of(plan, weight.shape[0], stream))


@cache
def compile_plan(plan: Plan, ranks: int, room: int, is_two_stage: bool) -> Callable[..., None]:
    """The launch for one plan, number of ranks and form; rows of x and of the weight stay symbolic."""
    tokens, rows = cute.sym_int32(), cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, plan.k),
        row_product.matrix_of(rows, plan.k),
        steps.fake_mailbox(),
        steps.fake_reach(ranks),
        steps.fake_control(),
        row_product.vector_of(cute.sym_int32(), Int32),
        Int32(0),
        row_product.stream_of(),
        plan,
        ranks,
        room,
        is_two_stage,
        options="--enable-tvm-ffi",
    )
    return compiled


def oproj_allreduce(
    *,
    x: "torch.Tensor",
    weight: "torch.Tensor",
    mailbox: "torch.Tensor",
    reach: "torch.Tensor",
    control: "torch.Tensor",
    launches: "torch.Tensor",
    layout: MailboxLayout,
    first_rank: int,
    limit: int,
    is_two_stage: bool = False,
) -> None:
    """Send this rank's part of `x @ weight.T` to its peers, in one launch; `ValueError` if out of scope.

    `limit` is the group's; a sender waits for nobody.
    """
    tokens, (rows, k) = x.shape[0], weight.shape
    if not 1 <= tokens <= 64 or rows % (8 * layout.ranks) or tokens * rows * 2 > layout.part_bytes:
        raise ValueError(
            f"oproj_allreduce: {tokens} rows outside 1..64 or beyond {layout.part_bytes} bytes, or "
            f"{rows} columns that 8 x {layout.ranks} ranks do not divide"
        )
    plan = plan_for(rows, k, tokens, has_warpgroups())
    launch = compile_plan(plan, layout.ranks, layout.part_bytes, is_two_stage)
    launch(x, weight, mailbox, reach, control, launches, first_rank)


def variants() -> tuple[Variant, ...]:
    """K3's output projections: one-shot up to 8 rows, two-stage up to 64."""
    roles = (
        ("x", "activation"), ("weight", "weight"), ("mailbox", "mailbox"), ("reach", "weight"),
        ("control", "state"), ("launches", "workspace"),
    )  # fmt: skip
    forms = [
        (plan, architectures, ranks, is_two_stage)
        for ranks in (2, 8, 16)
        for is_two_stage, tokens in ((False, 8), (True, 64))
        for plan, architectures in plans_by_architecture(((K3.hidden, K3.rank(ranks).channels),), (tokens,))
    ]
    return tuple(
        Variant(
            op="exchange",
            name=f"oproj_allreduce_r{ranks}_{plan.name}{'_two_stage' if is_two_stage else ''}",
            architectures=architectures,
            compile=lambda key=(plan, ranks, 64 * K3.hidden * 2, is_two_stage): compile_plan(*key),  # type: ignore[misc]
            parameters=roles,
            source="cute/oproj_allreduce.py",
            max_cluster=plan.cluster,
        )
        for plan, architectures, ranks, is_two_stage in forms
    )
