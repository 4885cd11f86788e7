"""What the MoE reads of its input: router logits (fp32) and the latent down-projection (bf16), in one pass
over x.

Scope: sm_90a (run; above 16 tokens by warpgroups), sm_100a and sm_103a (compiled; mma.sync throughout); 1
to 64 rows of x; hidden a multiple of 32; even numbers of router and latent rows, whole or one rank's
shard. Refused: more than 64 rows, odd row counts, strides that are no multiple of 8.

Layout: `x` [B,D] bf16, row stride free, written by the previous kernel; `router_weight` [E',D] and
`down_weight` [L',D] bf16, contiguous, constant; `logits` [B,E'] fp32 and `latent` [B,L'] bf16, row strides
free, every element written. The two weights are streamed as one matrix of E' + L' rows; a tile may hold
rows of both. 16-byte aligned bases. No null slots.

Numerics: bf16 products summed by the matrix unit over 128 elements of K (64 by warpgroups), these sums in
fp32, slices added in ascending order in fp32; the logits are not rounded again, the latent once to bf16.
The order depends on the plan alone. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_moe_front.py` compiles the smoke variant for the three architectures
and runs the traced functions over both weights on an emulated grid in numpy; its GPU tests compare with
the float64 products. On an H200 it was compared with the oracle at 1, 2, 3, 7, 8, 16, 17, 32 and 64 rows
of the TP8 and TP16 shards, in every input regime at 5 rows, and on the canary and nano models (NOTES.md).
Not run: compute-sanitizer, and anything on sm_100a and sm_103a.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute import row_product
from k3_decode.cute.plans import has_warpgroups, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.row_sums import Finished
from k3_decode.cute.variant import Variant
from k3_decode.shapes import CANARY, K3, NANO

if TYPE_CHECKING:
    import torch

__all__ = ["compile_plan", "moe_front", "variants"]

OP_INDEX = 3
"""Place of the op in the launch counters."""
CHAIN_STEPS = 4
"""Steps of K that the matrix unit sums before its result is added in fp32: selection compares the logits."""


@cute.kernel
def _project_both(
    x: cute.Tensor,
    router_weight: cute.Tensor,
    down_weight: cute.Tensor,
    logits: cute.Tensor,
    latent: cute.Tensor,
    launches: cute.Tensor,
    plan: cutlass.Constexpr,
):
    experts = router_weight.shape[0]
    segments = [
        (ins.byte_address(router_weight), experts),
        (ins.byte_address(down_weight), down_weight.shape[0]),
    ]
    counter = ins.byte_address(launches) + OP_INDEX * 4
    store = _store_to(logits, latent, experts)
    row_product.multiply(plan, segments, x, store, counter, chain=CHAIN_STEPS)


def _store_to(logits: cute.Tensor, latent: cute.Tensor, experts: Any) -> Callable[[Finished], None]:
    """What writes a finished pair to the output of its rows; the first row of `latent` is `experts`."""
    logits_at, latent_at = ins.byte_address(logits), ins.byte_address(latent) - Int64(experts) * 2
    logits_stride, latent_stride = logits.stride[0], latent.stride[0]

    def store(pair: Finished) -> None:
        token, row = Int64(pair.token), Int64(pair.row)
        is_router = Int32(pair.row < experts) & pair.is_wanted
        ins.store_f32_pair_if(logits_at + (token * logits_stride + row) * 4, pair.low, pair.high, is_router)
        word = ins.pack_halves(pair.low, pair.high)
        is_latent = Int32(pair.row >= experts) & pair.is_wanted
        ins.store_word_if(latent_at + (token * latent_stride + row) * 2, word, is_latent)

    return store


@cute.jit
def _launch(
    x: cute.Tensor,
    router_weight: cute.Tensor,
    down_weight: cute.Tensor,
    logits: cute.Tensor,
    latent: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
    plan: cutlass.Constexpr,
):
    rows = router_weight.shape[0] + down_weight.shape[0]
    _project_both(x, router_weight, down_weight, logits, latent, launches, plan).launch(
        **row_product.launch_of(plan, rows, stream)
    )


@cache
def compile_plan(plan: Plan) -> Callable[..., None]:
    """The launch for one plan; token count, rows of both weights and strides stay symbolic."""
    tokens, experts, width = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, plan.k),
        row_product.matrix_of(experts, plan.k),
        row_product.matrix_of(width, plan.k),
        row_product.rows_of(tokens, experts, Float32, 2),
        row_product.rows_of(tokens, width, stride_of=2),
        row_product.vector_of(cute.sym_int32(), Int32),
        row_product.stream_of(),
        plan,
        options="--enable-tvm-ffi",
    )
    return compiled


def moe_front(
    *,
    x: "torch.Tensor",
    router_weight: "torch.Tensor",
    down_weight: "torch.Tensor",
    logits: "torch.Tensor",
    latent: "torch.Tensor",
    launches: "torch.Tensor",
) -> None:
    """Write `logits` and `latent` in one launch on this stream; raises `ValueError` outside the scope."""
    tokens, hidden = x.shape
    experts, width = router_weight.shape[0], down_weight.shape[0]
    if not 1 <= tokens <= 64:
        raise ValueError(f"moe_front: {tokens} rows of x are outside 1..64; split the step")
    if experts % 2 or width % 2:
        raise ValueError(f"moe_front: {experts} router and {width} latent rows must be even")
    launch = compile_plan(plan_for(experts + width, hidden, tokens, has_warpgroups()))
    launch(x, router_weight, down_weight, logits, latent, launches)


def variants() -> tuple[Variant, ...]:
    """Whole and sharded fronts of K3 and of the small models, at each token capacity."""
    shapes = tuple(
        ((model.experts + model.latent) // parts, model.hidden)
        for model, divisions in ((K3, (8, 16, 1, 2, 4)), (CANARY, (1, 2)), (NANO, (1, 2)))
        for parts in divisions
    )
    roles = (
        ("x", "activation"), ("router_weight", "weight"), ("down_weight", "weight"), ("logits", "output"),
        ("latent", "output"), ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="moe_front",
            name=f"moe_front_{plan.name}",
            architectures=architectures,
            compile=lambda plan=plan: compile_plan(plan),  # type: ignore[misc]
            parameters=roles,
            source="cute/moe_front.py",
            is_smoke=plan == plan_for(560, 7168, 8, True),
            max_cluster=plan.cluster,
        )
        for plan, architectures in plans_by_architecture(shapes)
    )
