"""Expert selection: sigmoid scores, top-k of score + bias, renormalised weights; one block a token.

Scope: sm_90a (run), sm_100a and sm_103a (compiled); any number of tokens; experts a multiple of 4, at most
4096 and at least `top_k`; `top_k` at most 32.

Layout: `logits` fp32 [B,E] (row stride a multiple of 4), `bias` fp32 [E] (constant, read before the wait),
`ids` int32 and `weights` fp32 [B,k] compact, written in full, in falling order of score + bias.

Numerics: score = 1 / (1 + exp(-logit)) and key = score + bias in fp32. A NaN logit has score 0, and a NaN
logit or bias the key -inf. Ties go to the lower id. weight = scale x score / (sum + 1e-20); the sum is a
butterfly over the selected scores in their order, so equal inputs give equal bits.

Selection: a lane holds 4 experts, a warp 128. Each warp finds the r-th largest of its lanes' largest keys,
r warps-th part of k; the smallest of these over the warps is not above the k-th key, so only keys from
there on compete (about 40 of 896), each ranked by counting the better ones. Many equal keys make it slow,
never wrong.

Validation: `tests/k3_decode/cute/test_router.py` compiles the variants for the three architectures and
replays the selection rule in torch on hostile rows; its GPU tests compare ids exactly and weights with the
float64 oracle. On an H200 all of that; calls alone, back to back and in replays gave the same bits; memcheck
and racecheck are clean. sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import instructions as ins
from k3_decode.cute import row_plan
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["choose", "load_biases", "router", "rounds_of", "space_bytes", "take_choice", "variants"]

OP_INDEX = 4
"""Place of the op in the launch counters."""
VECTOR = 4
"""Experts a lane holds: 16 bytes of fp32."""
LOWEST = -(2**31)
"""Below every key."""
MINUS_INFINITY = 0x807FFFFF - 2**32
"""Key of -inf."""
WEIGHT_FLOOR = 1e-20


@cute.kernel
def _select(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    launches: cute.Tensor,
    scale: Float32,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    space_at = cute.arch.alloc_smem(Uint8, space_bytes(experts), 16).toint()
    biases = load_biases(bias, tid, experts)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    logits_at = ins.byte_address(logits) + Int64(row) * logits.stride[0] * 4
    choose(logits_at, biases, tid, space_at, experts, top_k, warps_of(experts) * 32)
    if tid < 32:
        expert, share = take_choice(space_at, tid, scale, experts, top_k)
        if tid < top_k:
            place = (Int64(row) * top_k + tid) * 4
            ins.store_word(ins.byte_address(ids) + place, expert)
            ins.store_f32(ins.byte_address(weights) + place, share)
    if tid == 0 and row == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


def space_bytes(experts: int) -> int:
    """Shared memory of a choice: keys with ids, scores, the chosen, a limit a warp, a count."""
    return 12 * experts + 8 * 32 + 4 * 32 + 16


def load_biases(bias: cute.Tensor, tid: Int32, experts: int) -> tuple[Float32, ...]:
    """The biases of the thread's experts; constant, so before the wait on the previous kernel."""
    return ins.load_weight_f32(ins.byte_address(bias) + _place(tid, experts))


def _place(tid: Int32, experts: int) -> Int64:
    """Byte offset of the thread's experts within a row of fp32; past the end, of the last ones."""
    return Int64(cutlass.min(tid * VECTOR, experts - VECTOR)) * 4


@cute.jit
def choose(
    logits_at: Int64,
    biases: Any,
    tid: Int32,
    space_at: Int32,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    threads: cutlass.Constexpr,
):
    """All threads of a block: rank one token's experts and leave the best in shared memory for `take_choice`;
    ends with a block barrier.
    """
    lane, warp = tid % 32, tid // 32
    warps = warps_of(experts)
    keys_at, scores_at = space_at, space_at + 8 * experts
    best_at = scores_at + 4 * experts
    limits_at, count_at = best_at + 8 * 32, best_at + 12 * 32
    first = tid * VECTOR
    is_inside = first < experts
    if tid == 0:
        ins.asm("st.shared.b32 [$0], $1;", "r,r", [count_at, Int32(0)])
    values = ins.asm(
        "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,l",
        [logits_at + _place(tid, experts)], [Float32] * 4,
    )  # fmt: skip
    keys, scores = [], []
    for j in cutlass.range_constexpr(VECTOR):
        key, score = _key(values[j], biases[j])
        if first >= experts:
            key = Int32(LOWEST)
        keys.append(key)
        scores.append(score)

    limit = Int32(LOWEST)
    if cutlass.const_expr(warps > 1):
        rest = cutlass.max(cutlass.max(keys[0], keys[1]), cutlass.max(keys[2], keys[3]))
        rounds = rounds_of(experts, top_k)
        for r in cutlass.range_constexpr(rounds):
            limit = ins.asm("redux.sync.max.s32 $0, $1, -1;", "=r,r", [rest], [Int32])
            if cutlass.const_expr(r + 1 < rounds):
                holders = cute.arch.vote_ballot_sync(rest == limit)
                if lane == _lowest_bit(holders):
                    rest = Int32(LOWEST)
        if lane == 0 and warp < warps:
            ins.asm("st.shared.b32 [$0], $1;", "r,r", [limits_at + warp * 4, limit])
    cute.arch.sync_threads()
    if cutlass.const_expr(warps > 1):
        limit = ins.asm("ld.shared.b32 $0, [$1];", "=r,r", [limits_at], [Int32])
        for w in cutlass.range_constexpr(1, warps):
            theirs = ins.asm("ld.shared.b32 $0, [$1];", "=r,r", [limits_at + w * 4], [Int32])
            limit = cutlass.min(limit, theirs)
    for j in cutlass.range_constexpr(VECTOR):
        if is_inside and keys[j] >= limit:
            slot = ins.asm("atom.shared.add.s32 $0, [$1], 1;", "=r,r", [count_at], [Int32])
            ins.asm("st.shared.v2.b32 [$0], {$1,$2};", "r,r,r", [keys_at + slot * 8, keys[j], first + j])
            ins.shared_store_f32(scores_at + slot * 4, scores[j])
    cute.arch.sync_threads()

    count = ins.asm("ld.shared.b32 $0, [$1];", "=r,r", [count_at], [Int32])
    for c in cutlass.range(tid, count, threads, unroll=1):
        key, expert = ins.asm("ld.shared.v2.b32 {$0,$1}, [$2];", "=r,=r,r", [keys_at + c * 8], [Int32] * 2)
        rank = Int32(0)
        for other in cutlass.range(count, unroll=8):
            rank = rank + ins.asm(
                "{ .reg .pred p, q; .reg .b32 k, e; ld.shared.v2.b32 {k, e}, [$1]; setp.lt.s32 q, e, $3; "
                "setp.eq.and.s32 q, k, $2, q; setp.gt.or.s32 p, k, $2, q; selp.b32 $0, 1, 0, p; }",
                "=r,r,r,r", [keys_at + other * 8, key, expert], [Int32],
            )  # fmt: skip
        if rank < top_k:
            bits = ins.asm("ld.shared.b32 $0, [$1];", "=r,r", [scores_at + c * 4], [Int32])
            ins.asm("st.shared.v2.b32 [$0], {$1,$2};", "r,r,r", [best_at + rank * 8, expert, bits])
    cute.arch.sync_threads()


@cute.jit
def take_choice(
    space_at: Int32, lane: Int32, scale: Float32, experts: cutlass.Constexpr, top_k: cutlass.Constexpr
):
    """One warp, after `choose`: the expert of rank `lane` and its renormalised weight."""
    expert, score = Int32(0), Float32(0.0)
    if lane < top_k:
        expert, score = ins.asm(
            "ld.shared.v2.b32 {$0,$1}, [$2];", "=r,=f,r",
            [space_at + 12 * experts + lane * 8], [Int32, Float32],
        )  # fmt: skip
    total = score
    for step in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, 16 >> step)
    return expert, score / (total + WEIGHT_FLOOR) * scale


@cute.jit
def _key(logit: Float32, bias: Float32):
    """Order-preserving integer of score + bias, and the score."""
    score = 1.0 / (1.0 + cute.math.exp(-logit))
    if logit != logit:
        score = Float32(0.0)
    bits = ins.asm("mov.b32 $0, $1;", "=r,f", [score + bias], [Int32], is_pure=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if logit != logit or bias != bias:
        key = Int32(MINUS_INFINITY)
    return key, score


def _lowest_bit(mask: Int32) -> Int32:
    return ins.asm("{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", "=r,r", [mask], [Int32])


@cute.jit
def _launch(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    launches: cute.Tensor,
    scale: Float32,
    stream: Any,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
):
    _select(logits, bias, ids, weights, launches, scale, experts, top_k).launch(
        grid=(logits.shape[0], 1, 1),
        block=(warps_of(experts) * 32, 1, 1),
        preferred_smem_carveout=row_plan.CARVEOUT,
        stream=stream,
        use_pdl=True,
    )


@cache
def _compile(experts: int, top_k: int) -> Callable[..., None]:
    """The launch for one number of experts and of selected ones; tokens and the row stride stay symbolic."""
    tokens = cute.sym_int32()
    logits = make_fake_tensor(
        Float32, (tokens, experts), (cute.sym_int64(divisibility=4), 1), assumed_align=16
    )
    bias = make_fake_tensor(Float32, (experts,), (1,), assumed_align=16)
    ids = make_fake_tensor(Int32, (tokens, top_k), (top_k, 1), assumed_align=4)
    weights = make_fake_tensor(Float32, (tokens, top_k), (top_k, 1), assumed_align=4)
    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, logits, bias, ids, weights, launches, Float32(1.0), stream, experts, top_k,
        options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


def warps_of(experts: int) -> int:
    """Warps of a block: 128 experts each."""
    return -(-experts // (32 * VECTOR))


def rounds_of(experts: int, top_k: int) -> int:
    """Largest lane values a warp counts, so that all warps together count at least `top_k`."""
    return -(-top_k // warps_of(experts))


def router(
    *,
    logits: "torch.Tensor",
    bias: "torch.Tensor",
    ids: "torch.Tensor",
    weights: "torch.Tensor",
    scale: float,
    launches: "torch.Tensor",
) -> None:
    """Write the selected ids and their weights, in one launch."""
    experts, top_k = logits.shape[1], ids.shape[1]
    if experts % VECTOR or not top_k <= min(32, experts) or experts > 4096:
        raise ValueError(
            f"router: {top_k} of {experts} experts; it takes at most 32 of a multiple of {VECTOR} up to 4096"
        )
    _compile(experts, top_k)(logits, bias, ids, weights, launches, scale)


def variants() -> tuple[Variant, ...]:
    """K3, Kimi-Linear and the small models."""
    roles = (
        ("logits", "activation"), ("bias", "weight"), ("ids", "output"), ("weights", "output"),
        ("launches", "workspace"),
    )  # fmt: skip
    return tuple(
        Variant(
            op="router",
            name=f"router_e{experts}_k{top_k}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=(experts, top_k): _compile(*form),  # type: ignore[misc]
            parameters=roles,
            source="cute/router.py",
            is_smoke=experts == 896,
        )
        for experts, top_k in ((896, 16), (256, 8), (16, 4), (8, 2))
    )
