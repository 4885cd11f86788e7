"""The end of the MoE: RMSNorm of the combined latent, up-projection, plus the shared expert's output, in one
kernel.

Scope: sm_90a (run; above 16 tokens by warpgroups), sm_100a and sm_103a (compiled; mma.sync throughout); 1
to 64 rows; latent width a multiple of 32; an even number of output rows, the whole hidden or one rank's
shard. Refused: more than 64 rows, odd output rows, strides that are no multiple of 8.

Layout: `latent` [B,L] and `shared` [B,M] bf16, row strides free, written by earlier kernels; `norm_weight`
[L] and `up_weight` [M,L] bf16, contiguous, constant; `out` [B,M] bf16, row stride free, every element
written. 16-byte aligned bases. No null slots.

Numerics: the row's factor 1/sqrt(mean(latent^2) + eps) is applied to the finished fp32 sums, so no pass
over the latent precedes the product: latent x norm_weight is rounded to bf16 (as a separate norm would
round its output), products are summed in fp32 by the matrix unit, squares in fp32 by each lane, both added
over warps and cluster in ascending order; then sum x factor + shared in fp32 and one rounding. The order
depends on the plan alone. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_latent_tail.py` compiles the smoke variant for the three
architectures and runs the traced functions on an emulated grid in numpy; its GPU tests compare with the
float64 value. On an H200 it was compared with the oracle at 1, 2, 3, 7, 8, 16, 17, 32 and 64 rows of the
TP8 and TP16 shards, in every input regime at 5 rows, and on the canary and nano models (NOTES.md); after
the plans changed at 1, 7, 16, 17, 32 and 64 rows of TP1, 4, 8 and 16. Calls alone, back to back and in
replays gave the same bits; memcheck and racecheck are clean (2, 3 and 40 rows). sm_100a and sm_103a were
never run.
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

__all__ = ["compile_plan", "latent_tail", "variants"]

OP_INDEX = 7
"""Place of the op in the launch counters."""


@cute.kernel
def _norm_and_project(
    latent: cute.Tensor,
    norm_weight: cute.Tensor,
    up_weight: cute.Tensor,
    shared: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    eps: Float32,
    plan: cutlass.Constexpr,
    copies: cutlass.Constexpr,
):
    segments = [(ins.byte_address(up_weight), up_weight.shape[0])]
    counter = ins.byte_address(launches) + OP_INDEX * 4
    row_product.multiply(plan, segments, latent, _store_to(shared, out, copies), counter, norm_weight, eps)


def _store_to(shared: cute.Tensor, out: cute.Tensor, copies: int = 1) -> Callable[[Finished], None]:
    """What scales a finished pair, adds the shared expert's and writes it, to each of `copies` outputs."""
    shared_at, shared_stride = ins.byte_address(shared), shared.stride[0]
    targets = row_product.copies_of(out, copies)

    def store(pair: Finished) -> None:
        token, row = Int64(pair.token), Int64(pair.row)
        word = ins.load_activation_word_if(shared_at + (token * shared_stride + row) * 2, pair.is_wanted)
        low = pair.low * pair.scale + ins.low_half(word)
        high = pair.high * pair.scale + ins.high_half(word)
        word = ins.pack_halves(low, high)
        for out_at, out_stride in targets:
            ins.store_word_if(out_at + (token * out_stride + row) * 2, word, pair.is_wanted)

    return store


@cute.jit
def _launch(
    latent: cute.Tensor,
    norm_weight: cute.Tensor,
    up_weight: cute.Tensor,
    shared: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    eps: Float32,
    stream: Any,
    plan: cutlass.Constexpr,
    copies: cutlass.Constexpr,
):
    _norm_and_project(latent, norm_weight, up_weight, shared, out, launches, eps, plan, copies).launch(
        **row_product.launch_of(plan, up_weight.shape[0], stream)
    )


@cache
def compile_plan(plan: Plan, copies: int = 1) -> Callable[..., None]:
    """The launch for one plan and number of outputs; token count, weight rows and strides stay symbolic."""
    tokens, rows = cute.sym_int32(), cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, plan.k),
        row_product.vector_of(plan.k),
        row_product.matrix_of(rows, plan.k),
        row_product.rows_of(tokens, rows),
        row_product.rows_of(tokens, rows, copies=copies),
        row_product.vector_of(cute.sym_int32(), Int32),
        Float32(1e-5),
        row_product.stream_of(),
        plan,
        copies,
        options="--enable-tvm-ffi",
    )
    return compiled


def latent_tail(
    *,
    latent: "torch.Tensor",
    norm_weight: "torch.Tensor",
    up_weight: "torch.Tensor",
    shared: "torch.Tensor",
    out: "torch.Tensor",
    eps: float,
    launches: "torch.Tensor",
) -> None:
    """Write `shared + RMSNorm(latent) @ up_weight.T` to `out` in one launch; `ValueError` if out of scope.

    `out` [P,B,M] takes it P times: once for each rank that reads it.
    """
    tokens, (rows, width) = latent.shape[0], up_weight.shape
    if not 1 <= tokens <= 64 or rows % 2:
        raise ValueError(f"latent_tail: {tokens} tokens outside 1..64, or {rows} output rows no even number")
    copies = out.shape[0] if out.dim() == 3 else 1
    out = out[0] if out.dim() == 3 and copies == 1 else out
    launch = compile_plan(plan_for(rows, width, tokens, has_warpgroups()), copies)
    launch(latent, norm_weight, up_weight, shared, out, launches, eps)


def variants() -> tuple[Variant, ...]:
    """Whole and sharded tails of K3 and of the small models, at each token capacity."""
    shapes = tuple(
        (model.hidden // parts, model.latent)
        for model, divisions in ((K3, (8, 16, 1, 2, 4)), (CANARY, (1, 2)), (NANO, (1, 2)))
        for parts in divisions
    )
    roles = (
        ("latent", "activation"), ("norm_weight", "weight"), ("up_weight", "weight"),
        ("shared", "activation"), ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="latent_tail",
            name=f"latent_tail_{plan.name}",
            architectures=architectures,
            compile=lambda plan=plan: compile_plan(plan),  # type: ignore[misc]
            parameters=roles,
            source="cute/latent_tail.py",
            is_smoke=plan == plan_for(896, 3584, 8, True),
            max_cluster=plan.cluster,
        )
        for plan, architectures in plans_by_architecture(shapes)
    )
