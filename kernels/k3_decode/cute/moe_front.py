"""What the MoE reads of its input in one pass over x: router logits (fp32), latent down-projection (bf16),
and the shared expert's hidden values (bf16), SiTU of its gate and up products.

Scope: sm_90a (run; above 16 tokens by warpgroups), sm_100a and sm_103a (compiled; mma.sync throughout); 1
to 64 rows of x; width a multiple of 32; even numbers of router and latent rows, whole or one rank's
shard. Refused: more than 64 rows, odd row counts, strides that are no multiple of 8.

Layout: `x` [B,D] bf16, row stride free, written by the previous kernel; `router_weight` [E',D] and
`down_weight` [L',D] bf16, contiguous, constant; `logits` [B,E'] fp32, `latent` [B,L'] and `hidden`
[B,S] bf16, row strides free, every element written. `prepare` interleaves the rows of `gate_up_weight` [2S,D]
once (gate 0, up 0, gate 1, ...), so that a finished pair of rows is one hidden value. The weights are
streamed as one matrix of E' + L' + 2S rows; a tile may hold rows of several. 16-byte aligned bases. No null
slots.

Numerics: bf16 products summed by the matrix unit over 128 elements of K (64 by warpgroups), these sums in
fp32, slices added in ascending order in fp32; the logits are not rounded again, the latent once to bf16;
SiTU in fp32 on unrounded sums, rounded once.
The order depends on the plan alone. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_moe_front.py` compiles the smoke variant for the three architectures
and runs the traced functions over both weights on an emulated grid in numpy; its GPU tests compare with
the float64 products. On an H200 it was compared with the oracle at 1, 2, 3, 7, 8, 16, 17, 32 and 64 rows
of the TP8 and TP16 shards, in every input regime at 5 rows, and on the canary and nano models (NOTES.md).
Calls alone, back to back and in replays gave the same bits; memcheck and racecheck are clean (2, 3, 12 and 40
rows). sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute import ring, row_product
from k3_decode.cute.plans import has_warpgroups, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Finished
from k3_decode.cute.variant import Variant
from k3_decode.shapes import CANARY, K3, NANO

if TYPE_CHECKING:
    import torch

__all__ = ["compile_plan", "moe_front", "prepare", "variants"]

OP_INDEX = 3
"""Place of the op in the launch counters."""
CHAIN_STEPS = 4
"""Steps of K that the matrix unit sums before its result is added in fp32: selection compares the logits."""


@cute.kernel
def _project_all(
    x: cute.Tensor,
    router_weight: cute.Tensor,
    down_weight: cute.Tensor,
    gate_up_weight: cute.Tensor,
    logits: cute.Tensor,
    latent: cute.Tensor,
    hidden: cute.Tensor,
    launches: cute.Tensor,
    plan: cutlass.Constexpr,
    copies: cutlass.Constexpr,
    has_hidden: cutlass.Constexpr,
):
    experts, width = router_weight.shape[0], down_weight.shape[0]
    segments = [
        (ins.byte_address(router_weight), experts),
        (ins.byte_address(down_weight), width),
    ]
    if cutlass.const_expr(has_hidden):
        segments.append((ins.byte_address(gate_up_weight), gate_up_weight.shape[0]))
    counter = ins.byte_address(launches) + OP_INDEX * 4
    store = _store_to(logits, latent, hidden if has_hidden else None, experts, width, copies)
    row_product.multiply(plan, segments, x, store, counter, chain=CHAIN_STEPS)


def _store_to(
    logits: cute.Tensor,
    latent: cute.Tensor,
    hidden: cute.Tensor | None,
    experts: Any,
    width: Any,
    copies: int = 1,
) -> Callable[[Finished], None]:
    """What writes a finished pair to the output of its rows: `experts` rows of logits, `width` of the latent,
    then gate and up rows by turns. Logits and latent go to each of `copies` outputs.
    """
    logit_targets = row_product.copies_of(logits, copies)
    latent_targets = row_product.copies_of(latent, copies)
    first_gate = experts + width
    store_hidden = None if hidden is None else _store_hidden_to(hidden, first_gate)

    def store(pair: Finished) -> None:
        token, row = Int64(pair.token), Int64(pair.row)
        is_router = Int32(pair.row < experts) & pair.is_wanted
        for at, stride in logit_targets:
            ins.store_f32_pair_if(at + (token * stride + row) * 4, pair.low, pair.high, is_router)
        word = ins.pack_halves(pair.low, pair.high)
        is_latent = Int32(pair.row >= experts) & Int32(pair.row < first_gate) & pair.is_wanted
        for at, stride in latent_targets:
            ins.store_word_if(at + (token * stride + row - Int64(experts)) * 2, word, is_latent)
        if store_hidden is not None:
            store_hidden(pair)

    return store


def _store_hidden_to(hidden: cute.Tensor, first_gate: Any) -> Callable[[Finished], None]:
    """What writes SiTU of a finished gate and up; the first gate is row `first_gate`."""
    base, stride = ins.byte_address(hidden), hidden.stride[0]

    def store(pair: Finished) -> None:
        is_hidden = Int32(pair.row >= first_gate) & pair.is_wanted
        column = (Int64(pair.row) - Int64(first_gate)) // 2
        at = base + (Int64(pair.token) * stride + column) * 2
        ins.store_half_if(at, ring.situ(pair.low, pair.high), is_hidden)

    return store


@cute.jit
def _launch(
    x: cute.Tensor,
    router_weight: cute.Tensor,
    down_weight: cute.Tensor,
    gate_up_weight: cute.Tensor,
    logits: cute.Tensor,
    latent: cute.Tensor,
    hidden: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
    plan: cutlass.Constexpr,
    copies: cutlass.Constexpr,
    has_hidden: cutlass.Constexpr,
):
    rows = router_weight.shape[0] + down_weight.shape[0]
    if cutlass.const_expr(has_hidden):
        rows = rows + gate_up_weight.shape[0]
    _project_all(
        x,
        router_weight,
        down_weight,
        gate_up_weight,
        logits,
        latent,
        hidden,
        launches,
        plan,
        copies,
        has_hidden,
    ).launch(**row_product.launch_of(plan, rows, stream))


@cache
def compile_plan(plan: Plan, copies: int = 1, has_hidden: bool = True) -> Callable[..., None]:
    """The launch for one plan and number of outputs, with or without hidden values; token count, rows of the
    weights and strides stay symbolic.
    """
    tokens, experts, width = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    gates, inter = cute.sym_int32(), cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, plan.k),
        row_product.matrix_of(experts, plan.k),
        row_product.matrix_of(width, plan.k),
        row_product.matrix_of(gates, plan.k),
        row_product.rows_of(tokens, experts, Float32, 2, copies),
        row_product.rows_of(tokens, width, stride_of=2, copies=copies),
        row_product.rows_of(tokens, inter, stride_of=2),
        row_product.vector_of(cute.sym_int32(), Int32),
        row_product.stream_of(),
        plan,
        copies,
        has_hidden,
        options="--enable-tvm-ffi",
    )
    return compiled


def prepare(
    *, router_weight: "torch.Tensor", down_weight: "torch.Tensor", gate_up_weight: "torch.Tensor"
) -> dict[str, "torch.Tensor"]:
    """The weights with gate and up rows by turns; for load time."""
    halves = gate_up_weight.view(2, -1, gate_up_weight.shape[1])
    turns = halves.transpose(0, 1).reshape(gate_up_weight.shape).contiguous()
    return {"router_weight": router_weight, "down_weight": down_weight, "gate_up_weight": turns}


def moe_front(
    *,
    x: "torch.Tensor",
    router_weight: "torch.Tensor",
    down_weight: "torch.Tensor",
    gate_up_weight: "torch.Tensor",
    logits: "torch.Tensor",
    latent: "torch.Tensor",
    hidden: "torch.Tensor | None",
    launches: "torch.Tensor",
) -> None:
    """Write `logits`, `latent` and `hidden` in one launch on this stream; `gate_up_weight` as from `prepare`.

    `logits` [P,B,E'] and `latent` [P,B,L'] take them P times: once for each rank that reads them. Raises
    `ValueError` outside the scope.
    """
    tokens, k = x.shape
    experts, width = router_weight.shape[0], down_weight.shape[0]
    if not 1 <= tokens <= 64:
        raise ValueError(f"moe_front: {tokens} rows of x are outside 1..64; split the step")
    if experts % 2 or width % 2:
        raise ValueError(f"moe_front: {experts} router and {width} latent rows must be even")
    has_hidden = hidden is not None
    rows = experts + width + (gate_up_weight.shape[0] if has_hidden else 0)
    if hidden is None:
        hidden = latent if latent.dim() == 2 else latent[0]
    copies = logits.shape[0] if logits.dim() == 3 else 1
    if logits.dim() == 3 and copies == 1:
        logits, latent = logits[0], latent[0]
    plan = plan_for(rows, k, tokens, has_warpgroups(), is_late=not has_hidden)
    launch = compile_plan(plan, copies, has_hidden)
    launch(x, router_weight, down_weight, gate_up_weight, logits, latent, hidden, launches)


def variants() -> tuple[Variant, ...]:
    """Whole and sharded fronts of K3 and of the small models, at each token capacity."""
    shapes = tuple(
        ((model.experts + model.latent) // parts + 2 * model.rank(tp).shared_inter, model.hidden)
        for model, divisions in ((K3, (8, 16, 1, 2, 4)), (CANARY, (1, 2)), (NANO, (1, 2)))
        for tp in divisions
        for parts in dict.fromkeys((1, tp))
    )
    roles = (
        ("x", "activation"), ("router_weight", "weight"), ("down_weight", "weight"),
        ("gate_up_weight", "weight"), ("logits", "output"), ("latent", "output"), ("hidden", "output"),
        ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="moe_front",
            name=f"moe_front_{plan.name}",
            architectures=architectures,
            compile=lambda plan=plan: compile_plan(plan),  # type: ignore[misc]
            parameters=roles,
            source="cute/moe_front.py",
            is_smoke=plan == plan_for(2096, 7168, 8, True),
            max_cluster=plan.cluster,
        )
        for plan, architectures in plans_by_architecture(shapes)
    )
