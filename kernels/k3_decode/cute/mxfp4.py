"""MXFP4 weights as the expert kernel reads them: fragment order in memory, exact decoding in registers.

A *stage* is what one warp multiplies at a time: 16 rows by `groups` scale groups (32 values each) along K.
Lane l holds, for every group, the 8 consecutive values 8(l%4).. of row l//4 and of row l//4 + 8, one 32-bit
word each; words of two neighbouring groups lie side by side, so that a lane reads 16 bytes at a time. The
scale bytes follow: for each of the 8 lane rows, those of row l//4, then those of row l//4 + 8, each half
padded to `scale_half` bytes. A stage is one piece of memory, a multiple of 128 bytes.

Decoding. E2M1 sign and magnitude bits, put at bits 15 and 11..9 of an fp16, are that value times 2^-14,
also for the subnormal code 0.5: no table and no multiplication. `reorder_words` spreads the eight codes of
a word so that nine logical instructions give four fp16 pairs. The tensor core multiplies fp16 subnormals
exactly and accumulates in fp32; the group's scale 2^(e-127) multiplies the fp32 sum of its 32 products.
Byte 0 counts as zero (its factor is below fp32's normal range); byte 255 (NaN) is refused by `pack_stages`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cutlass import Float32, Int32

from k3_decode.cute.instructions import asm, shared_load

if TYPE_CHECKING:
    import torch

__all__ = [
    "CODE_EXPONENT",
    "GROUP",
    "added",
    "decode_word",
    "decode_scale",
    "mma_f16",
    "multiply",
    "pack_stages",
    "reorder_words",
    "scale_half",
    "stage_bytes",
    "stage_scales",
    "stage_words",
]

GROUP = 32
"""Values that share a scale byte."""
ROWS = 16
"""Rows of a stage."""
CODE_EXPONENT = 14
"""A decoded fp16 is the E2M1 value times 2^-14."""
SIGN_BITS = (15, 31, 7, 23, 8, 24, 0, 16)
"""Bit at which the sign of each of a word's eight codes is kept."""
MAGNITUDE_BITS = (9, 25, 1, 17, 12, 28, 4, 20)
"""Lowest of the three bits at which the magnitude of each code is kept."""


def scale_half(groups: int) -> int:
    """Bytes that hold one row's scales within a stage: 8, or 16 above 8 groups."""
    if not 1 <= groups <= 16:
        raise ValueError(f"a stage holds 1 to 16 groups, not {groups}")
    return 8 if groups <= 8 else 16


def stage_bytes(groups: int) -> int:
    """Size of a stage: 256 bytes of codes a group, then the scales of 16 rows."""
    return groups * ROWS * GROUP // 2 + ROWS * scale_half(groups)


def reorder_words(words: "torch.Tensor") -> "torch.Tensor":
    """int32 words of eight codes in storage order (code i at bits 4i) -> the same codes where `decode_word`
    wants them.
    """
    import torch

    result = torch.zeros_like(words)
    for code in range(8):
        nibble = (words >> (4 * code)) & 15
        result |= (nibble & 7) << MAGNITUDE_BITS[code]
        result |= (nibble >> 3) << SIGN_BITS[code]
    return result


def pack_stages(codes: "torch.Tensor", scales: "torch.Tensor", groups: int) -> "torch.Tensor":
    """Codes uint8 [N,2,8,K/2] and scales uint8 [N,2,8,K/32] of N tiles -> stages uint8 [N, K/32/groups,
    stage_bytes].

    Axis 1 is the half of a 16-row tile, axis 2 the row within it. Raises `ValueError` for a scale byte of
    255.
    """
    import torch

    tiles, slices = scales.shape[0], scales.shape[3] // groups
    if bool((scales == 255).any()):
        raise ValueError("pack_stages: a scale byte is 255 (NaN); the checkpoint is broken at that expert")
    words = reorder_words(codes.contiguous().view(torch.int32))
    # [N, half, row, slice, group, quarter] -> [N, slice, group, row, quarter, half]
    words = words.view(tiles, 2, 8, slices, groups, 4).permute(0, 3, 4, 2, 5, 1)
    pairs = groups // 2
    even = words[:, :, : 2 * pairs].unflatten(2, (pairs, 2)).permute(0, 1, 2, 4, 5, 3, 6)
    parts = [even.reshape(tiles, slices, -1), words[:, :, 2 * pairs :].reshape(tiles, slices, -1)]
    packed = torch.cat(parts, dim=2).contiguous().view(torch.uint8).view(tiles, slices, -1)
    padded = scales.new_zeros(tiles, slices, 8, 2, scale_half(groups))
    padded[..., :groups] = scales.view(tiles, 2, 8, slices, groups).permute(0, 3, 2, 1, 4)
    return torch.cat([packed, padded.view(tiles, slices, -1)], dim=2)


def decode_word(word: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Eight codes -> four fp16 pairs in value order, each value times 2^-14."""
    template = (
        "{ .reg .b32 a, b, f; and.b32 $0, $4, 0x8E008E00; shl.b32 a, $4, 8; and.b32 $1, a, 0x8E008E00; "
        "shl.b32 a, $4, 7; shr.u32 b, $4, 3; lop3.b32 f, a, b, 0x80808080, 0xE4; and.b32 $2, f, 0x8E008E00; "
        "shl.b32 a, f, 8; and.b32 $3, a, 0x8E008E00; }"
    )
    return asm(template, "=&r,=&r,=&r,=&r,r", [word], [Int32] * 4, is_pure=True)


def decode_scale(word: Int32, byte: int) -> Float32:
    """2^(e-127) of scale byte e at place `byte` of a word; 0 for e = 0."""
    shift = 23 - 8 * byte
    move = f"shl.b32 t, $1, {shift};" if shift >= 0 else f"shr.u32 t, $1, {-shift};"
    template = "{ .reg .b32 t; " + move + " and.b32 t, t, 0x7F800000; mov.b32 $0, t; }"
    return asm(template, "=f,r", [word], [Float32], is_pure=True)


def mma_f16(a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> tuple[Float32, ...]:
    """16x8 += 16x16 @ 16x8 on one warp: fp16 operands, fp32 accumulator, by `mma.sync`."""
    template = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return asm(template, constraints, [*a, *b, *c], [Float32] * 4, is_pure=True)


def stage_words(at: Int32, lane: Int32, groups: int) -> list[Int32]:
    """Words of a stage in this lane: for each group row l//4, then row l//4 + 8."""
    words: list[Int32] = []
    for pair in range(groups // 2):
        words.extend(shared_load(at + pair * 512 + lane * 16))
    if groups % 2:
        place = at + groups // 2 * 512 + lane * 8
        words.extend(asm("ld.shared.v2.b32 {$0,$1}, [$2];", "=r,=r,r", [place], [Int32] * 2))
    return words


def stage_scales(at: Int32, row: Int32, groups: int) -> list[Int32]:
    """Scale bytes of the lane's two rows, as words: first row's half, then the second's."""
    half = scale_half(groups)
    place = at + groups * 256 + row * (2 * half)
    words: list[Int32] = []
    for part in range(2 * half // 16):
        words.extend(shared_load(place + part * 16))
    return words


def multiply(codes: list[Int32], scales: list[Int32], b: list[Int32], groups: int) -> list[Float32]:
    """16 rows x 4 tokens (at the even columns) over `groups` groups of K: this lane's scaled fp32 sums of
    row l//4 and of row l//4 + 8, times 2^-14 for the codes' exponent.
    """
    half = scale_half(groups) // 4
    upper, lower = Float32(0.0), Float32(0.0)
    zero = [Float32(0.0)] * 4
    for g in range(groups):
        top, bottom = decode_word(codes[2 * g]), decode_word(codes[2 * g + 1])
        part = mma_f16((top[0], bottom[0], top[1], bottom[1]), b[4 * g : 4 * g + 2], zero)
        part = mma_f16((top[2], bottom[2], top[3], bottom[3]), b[4 * g + 2 : 4 * g + 4], part)
        upper = upper + part[0] * decode_scale(scales[g // 4], g % 4)
        lower = lower + part[2] * decode_scale(scales[half + g // 4], g % 4)
    return [upper, lower]


def added(left: list[Float32], right: list[Float32]) -> list[Float32]:
    """Two lists of sums, element by element."""
    return [a + b for a, b in zip(left, right, strict=True)]
