"""What splits of a context leave behind: how many there are, their buffers, and the kernel that merges them.

`mla_attend` writes the partials; `mla_value` merges them itself, so the kernel here serves callers that want
the whole latent. Every lse is a natural logarithm; a split without tokens has -inf and weight 0.
"""

from collections.abc import Callable
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.mla_tile import LATENT, PAIRS
from k3_decode.cute.row_stream import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = [
    "OP_INDEX", "WORKSPACE_BYTES", "fake", "fake_partials", "merge_partials", "split_workspace", "splits_of",
    "variants", "wide", "workspace_bytes",
]  # fmt: skip

OP_INDEX = 9
"""Place of the op in the launch counters."""
MERGE_THREADS_A_ROW = LATENT // 8
MERGE_PLACES = 4
MERGE_BATCH = 8
"""Splits that a thread of the merge has on their way at once."""
WANTED_BLOCKS = 128
"""Blocks that a step is spread over: one for nearly every SM of an H200, and a power of two."""

WORKSPACE_BYTES = WANTED_BLOCKS * PAIRS * (LATENT * 2 + 4)
"""A workspace that serves every step: splits x requests x pairs never exceed it where there is a split."""


def splits_of(requests: int, rows: int, heads: int) -> int:
    """Splits of each request's context that fill the device: the S of the workspace."""
    pair_tiles = (rows * heads + PAIRS - 1) // PAIRS
    return max(1, WANTED_BLOCKS // (requests * pair_tiles))


def workspace_bytes(requests: int, rows: int, heads: int) -> int:
    """Size of the workspace with which `mla_attend` may split the context."""
    pairs = requests * rows * heads
    return splits_of(requests, rows, heads) * pairs * (LATENT * 2 + 4)


def split_workspace(
    workspace: "torch.Tensor", splits: int, tokens: int, heads: int
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Partials and their lse as views of the workspace's bytes."""
    import torch

    pairs = splits * tokens * heads
    if workspace.numel() < pairs * (LATENT * 2 + 4):
        raise ValueError(
            f"mla_attend: a workspace of {workspace.numel()} bytes; {splits} splits of {tokens} rows and "
            f"{heads} heads need "
            f"{pairs * (LATENT * 2 + 4)} (workspace_bytes)"
        )
    partial = workspace[: pairs * LATENT * 2].view(torch.bfloat16).view(splits, tokens, heads, LATENT)
    end = pairs * (LATENT * 2 + 4)
    return partial, workspace[pairs * LATENT * 2 : end].view(torch.float32).view(splits, tokens, heads)


def fake(kind: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
    return make_fake_tensor(kind, shape, stride, assumed_align=align)


def wide(divisibility: int) -> Any:
    return cute.sym_int64(divisibility=divisibility)


def fake_partials(splits: Any, tokens: Any, heads: Any) -> tuple[Any, Any]:
    partial = fake(BFloat16, (splits, tokens, heads, LATENT), (wide(8), wide(8), LATENT, 1))
    return partial, fake(Float32, (splits, tokens, heads), (wide(1), wide(1), 1), 4)


def merge_partials(
    partial: "torch.Tensor",
    partial_lse: "torch.Tensor",
    out: "torch.Tensor",
    lse: "torch.Tensor",
    launches: "torch.Tensor",
) -> None:
    """Merge the splits `partial` [S,B,H,512] with `partial_lse` [S,B,H] to `out` and `lse`, in one launch."""
    _compile_merge()(partial, partial_lse, out, lse, launches)


def variants() -> tuple[Variant, ...]:
    """The merge, one for all shapes."""
    roles = (
        ("partial", "activation"), ("partial_lse", "activation"), ("out", "output"), ("lse", "output"),
        ("launches", "workspace"),
    )  # fmt: skip
    merge = Variant(
        op="mla_attend", name="mla_attend_merge", architectures=DISPATCHED + COMPILED, compile=_compile_merge,
        parameters=roles, source="cute/mla_partials.py",
    )  # fmt: skip
    return (merge,)


@cute.kernel
def _merge(
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    launches: cute.Tensor,
):
    tid, _, _ = cute.arch.thread_idx()
    head, token, _ = cute.arch.block_idx()
    lane = tid % 32
    splits = partial.shape[0]
    place, column = tid // MERGE_THREADS_A_ROW, tid % MERGE_THREADS_A_ROW * 8
    sums_at = cute.arch.alloc_smem(Float32, MERGE_PLACES * LATENT, 16).toint()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    lse_at = ins.byte_address(partial_lse) + (Int64(token) * partial_lse.stride[1] + Int64(head)) * 4
    lse_bytes = Int64(partial_lse.stride[0]) * 4
    from_at = (
        ins.byte_address(partial) + Int64(token) * partial.stride[1] * 2 + Int64(head * LATENT + column) * 2
    )
    split_bytes = Int64(partial.stride[0]) * 2
    hidden = Float32(-Float32.inf)
    peak = hidden
    for base in cutlass.range(lane, splits, 32):
        peak = cute.arch.fmax(peak, frag.load_f32(lse_at + Int64(cutlass.min(base, splits - 1)) * lse_bytes))
    peak = frag.max_lanes([peak])[0]
    shift = frag.choose_f32(Int32(peak > hidden), peak, Float32(0.0))
    total = Float32(0.0)
    for base in cutlass.range(lane, splits, 32):
        value = frag.load_f32(lse_at + Int64(cutlass.min(base, splits - 1)) * lse_bytes)
        total = total + frag.keep_if(frag.exp2((value - shift) * frag.LOG2E), Int32(base < splits))
    total = frag.sum_lanes([total], (16, 8, 4, 2, 1))[0]

    mixed = [Float32(0.0)] * 8
    for base in cutlass.range(place, splits, MERGE_PLACES * MERGE_BATCH):
        places = [cutlass.min(base + i * MERGE_PLACES, splits - 1) for i in range(MERGE_BATCH)]
        words = [ins.load_activation(from_at + Int64(split) * split_bytes) for split in places]
        values = [frag.load_f32(lse_at + Int64(split) * lse_bytes) for split in places]
        for i in cutlass.range_constexpr(MERGE_BATCH):
            share = frag.exp2((values[i] - shift) * frag.LOG2E)
            share = frag.keep_if(share, Int32(base + i * MERGE_PLACES < splits))
            mixed = _added(mixed, words[i], share)
    spot = sums_at + (place * LATENT + column) * 4
    frag.shared_store_f32x4(spot, (mixed[0], mixed[1], mixed[2], mixed[3]))
    frag.shared_store_f32x4(spot + 16, (mixed[4], mixed[5], mixed[6], mixed[7]))
    cute.arch.sync_threads()
    inverse = frag.keep_if(frag.reciprocal(total), Int32(total > 0.0))
    if place == 0:
        sums = [Float32(0.0)] * 8
        for i in cutlass.range_constexpr(MERGE_PLACES):
            row = sums_at + (i * LATENT + column) * 4
            sums = [s + v for s, v in zip(sums[:4], frag.shared_load_f32x4(row), strict=True)] + [
                s + v for s, v in zip(sums[4:], frag.shared_load_f32x4(row + 16), strict=True)
            ]
        packed = [ins.pack_halves(sums[i] * inverse, sums[i + 1] * inverse) for i in range(0, 8, 2)]
        to = ins.byte_address(out) + Int64(token) * out.stride[0] * 2 + Int64(head * LATENT + column) * 2
        ins.store_words(to, (packed[0], packed[1], packed[2], packed[3]))
    if tid == 0:
        lse_to = ins.byte_address(lse) + (Int64(token) * lse.stride[0] + Int64(head)) * 4
        frag.store_f32(lse_to, peak + frag.log2(total) * frag.LN2)
    if tid + head + token == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


def _added(mixed: list[Float32], words: ins.Words, share: Float32) -> list[Float32]:
    """mixed + share x 8 columns; a share of 0 adds 0 even to NaN."""
    is_kept = Int32(share > 0.0)
    kept = [frag.mask_word(word, is_kept) for word in words]
    values = [half for word in kept for half in (ins.low_half(word), ins.high_half(word))]
    return [m + share * v for m, v in zip(mixed, values, strict=True)]


@cute.jit
def _launch_merge(
    partial: cute.Tensor,
    partial_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
):
    _merge(partial, partial_lse, out, lse, launches).launch(
        grid=(partial.shape[2], partial.shape[1], 1),
        block=(MERGE_THREADS_A_ROW * MERGE_PLACES, 1, 1),
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=CARVEOUT,
    )


@memoize
def _compile_merge() -> Callable[..., None]:
    """The launch of the merge; everything stays symbolic."""
    tokens, heads = cute.sym_int32(), cute.sym_int32()
    partial, partial_lse = fake_partials(cute.sym_int32(), tokens, heads)
    out = fake(BFloat16, (tokens, heads, LATENT), (wide(8), LATENT, 1))
    lse = fake(Float32, (tokens, heads), (wide(1), 1), 4)
    launches = fake(Int32, (cute.sym_int32(),), (1,), 4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch_merge, partial, partial_lse, out, lse, launches, stream, options="--enable-tvm-ffi"
    )
    return compiled
