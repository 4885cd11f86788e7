"""What both kernels of `mla_query` share: how a head is spread over a cluster, words, and cache rows.

`mla_query.py` takes 16 tokens a block and `mla_query_wide.py` 32 or 64.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins

__all__ = [
    "CHUNK", "CLUSTER", "HEAD_ROWS", "LATENT", "MAIN_BARRIER", "NOPE", "NOPE_PITCH", "OP_INDEX",
    "OWN_COLUMNS", "OWN_ROWS", "ROPE", "UK_PITCH", "WARPS", "begin_uk_copies", "bf16_words", "fakes_of",
    "floats", "store_cache_row",
]  # fmt: skip

OP_INDEX = 8
"""Place of the op in the launch counters."""
CLUSTER = 8
HEAD_ROWS = 192
OWN_ROWS = HEAD_ROWS // CLUSTER
NOPE, LATENT, ROPE = 128, 512, 64
OWN_COLUMNS = LATENT // CLUSTER
PAGE_SIZE = 64
WARPS = 8
CHUNK = 32
"""Columns of K that one 16-byte load of each of a row's four lanes covers: two mma steps."""
UK_PITCH = OWN_COLUMNS * 2 + 16
NOPE_PITCH = NOPE * 2 + 16
MAIN_BARRIER = 1


def fakes_of(q_lora: int, is_fp8: bool) -> tuple[Any, ...]:
    """Tensors, two scalars and stream that a launch is compiled for; heads, tokens, pages stay symbols."""
    tokens, heads = cute.sym_int32(), cute.sym_int32()

    def fake(kind: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
        return make_fake_tensor(kind, shape, stride, assumed_align=align)

    def wide(divisibility: int) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    packed = fake(BFloat16, (tokens, cute.sym_int32()), (wide(8), 1))
    q_norm, kv_norm = fake(BFloat16, (q_lora,), (1,)), fake(BFloat16, (LATENT,), (1,))
    q_weight = fake(BFloat16, (cute.sym_int32(), q_lora), (q_lora, 1))
    uk_weight = fake(BFloat16, (heads, NOPE, LATENT), (NOPE * LATENT, LATENT, 1))
    kind = Uint8 if is_fp8 else BFloat16
    cache = fake(kind, (cute.sym_int32(), PAGE_SIZE, LATENT + ROPE), (wide(16), wide(16), 1))
    slot_mapping = fake(Int64, (tokens,), (1,), 8)
    query = fake(BFloat16, (tokens, heads, LATENT + ROPE), (wide(8), LATENT + ROPE, 1))
    launches = fake(Int32, (cute.sym_int32(),), (1,), 4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return (
        packed, q_norm, kv_norm, q_weight, uk_weight, cache, slot_mapping, query, launches, Float32(1.0),
        Float32(1e-5), stream,
    )  # fmt: skip


def begin_uk_copies(uk_weight: cute.Tensor, head: Int32, rank: Int32, tid: Int32, uk_at: Int32) -> None:
    """The main warps' threads start copying the block's columns of a head's W_UK into shared memory at
    `uk_at`, one group of asynchronous copies.
    """
    source = ins.byte_address(uk_weight) + Int64(head * (NOPE * LATENT) + rank * OWN_COLUMNS) * 2
    for i in range(NOPE * OWN_COLUMNS * 2 // 16 // (32 * WARPS)):
        piece = tid + i * (32 * WARPS)
        row, part = piece // 8, piece % 8
        ins.copy_async(uk_at + row * UK_PITCH + part * 16, source + Int64(row * (LATENT * 2) + part * 16))
    cute.arch.cp_async_commit_group()


def floats(words: ins.Words) -> list[Float32]:
    """Eight bf16 as fp32."""
    return [half for word in words for half in (ins.low_half(word), ins.high_half(word))]


def bf16_words(values: list[Float32]) -> ins.Words:
    """Eight fp32 as bf16."""
    return tuple(ins.pack_halves(values[i], values[i + 1]) for i in range(0, 8, 2))


def _fp8_words(values: list[Float32], inverse_scale: Float32) -> tuple[Int32, Int32]:
    """Eight fp32 as e4m3 of their value over the cache's scale, saturating."""
    scaled = [value * inverse_scale for value in values]
    return frag.pack_fp8(scaled[:4]), frag.pack_fp8(scaled[4:])


@cute.jit
def store_cache_row(
    row_at: Int64,
    slot_at: Int64,
    scales: Any,
    cache: cute.Tensor,
    inverse_scale: Float32,
    eps: Float32,
    lane: Int32,
    is_fp8: cutlass.Constexpr,
):
    """One warp: the normed latent and k_pe from `row_at` on into the cache's row that `slot_at` names.

    `scales` is the norm's weight, eight columns a lane and half.
    """
    cache_at = ins.byte_address(cache)
    element = 1 if cutlass.const_expr(is_fp8) else 2
    words = [ins.load_activation(row_at + Int64(lane * 16 + i * 512)) for i in range(2)]
    rope_words = ins.load_activation(row_at + Int64(LATENT * 2 + lane % 8 * 16))
    slot = frag.load_long(slot_at)
    square = Float32(0.0)
    for i in cutlass.range_constexpr(2):
        for value in floats(words[i]):
            square = square + value * value
    square = frag.sum_lanes([square], (16, 8, 4, 2, 1))[0]
    scale = cute.rsqrt(square * (1.0 / LATENT) + eps)
    if slot >= 0:
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        to = cache_at + (page * cache.stride[0] + offset * cache.stride[1]) * element
        for i in cutlass.range_constexpr(2):
            scaled = [x * scale * w for x, w in zip(floats(words[i]), floats(scales[i]), strict=True)]
            if cutlass.const_expr(is_fp8):
                ins_words = _fp8_words(scaled, inverse_scale)
                frag.store_pair_if(to + Int64(lane * 8 + i * 256), ins_words, Int32(1))
            else:
                ins.store_words(to + Int64(lane * 16 + i * 512), bf16_words(scaled))
        if lane < 8:
            if cutlass.const_expr(is_fp8):
                ins_words = _fp8_words(floats(rope_words), inverse_scale)
                frag.store_pair_if(to + Int64(LATENT + lane * 8), ins_words, Int32(1))
            else:
                ins.store_words(to + Int64(LATENT * 2 + lane * 16), rope_words)
