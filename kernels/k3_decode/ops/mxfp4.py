"""MXFP4 (OCP Microscaling 1.0): E2M1 codes in groups of 32 along K, one E8M0 scale byte a group.

A byte holds two codes, the even index in the low nibble. A code is sign (bit 3) and magnitude (bits 0-2: 0,
0.5, 1, 1.5, 2, 3, 4, 6). Scale byte e means 2^(e-127), byte 0 included (2^-127); 255 is NaN and makes its
whole group NaN. Every product is exact in float64; in bf16 and fp32 it is exact up to byte 252, while at 253
magnitudes 4 and 6, and at 254 magnitudes from 2, overflow to infinity.

Quantising uses the specification's rule: shared exponent = floor(log2(largest magnitude)) - 2, then each
value to the nearest code, ties to the even code, saturating at 6.
"""

import torch

from k3_decode.shapes import MXFP4_GROUP

__all__ = [
    "E2M1_MAGNITUDES",
    "SCALE_BIAS",
    "SCALE_NAN",
    "decode_scale",
    "dequantise",
    "quantise",
    "unpack_codes",
]

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each three-bit code."""
E2M1_MAX_EXPONENT = 2
SCALE_BIAS = 127
SCALE_NAN = 255
ROUND_UP_AT = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between neighbouring magnitudes."""


def dequantise(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Values [..., K] of packed uint8 [..., K/2] and scale bytes uint8 [..., K/32]; rounded once if `dtype`
    must.
    """
    codes = unpack_codes(packed)
    values = _magnitudes(codes) * torch.where((codes & 8) != 0, -1.0, 1.0).to(torch.float64)
    factor = decode_scale(scales).repeat_interleave(MXFP4_GROUP, dim=-1)
    return (values * factor).to(dtype)


def decode_scale(scales: torch.Tensor) -> torch.Tensor:
    """float64 factor of each E8M0 byte; NaN for 255."""
    exponent = scales.to(torch.int32) - SCALE_BIAS
    factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    return factor.masked_fill(scales == SCALE_NAN, torch.nan)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Four-bit codes uint8 [..., K] of packed bytes [..., K/2]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., K/2] and scale bytes [..., K/32] of values [..., K]; K a multiple of 32.

    A group of zeros gets byte 0, a group that holds NaN or infinity gets 255.
    """
    if values.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"the last axis is {values.shape[-1]}, not a multiple of the group of {MXFP4_GROUP}")
    groups = values.to(torch.float64).reshape(*values.shape[:-1], -1, MXFP4_GROUP)
    peak = groups.abs().amax(-1)
    exponent = torch.frexp(peak).exponent.to(torch.int64) - 1 - E2M1_MAX_EXPONENT
    scales = (exponent + SCALE_BIAS).clamp(0, SCALE_NAN - 1).masked_fill(peak == 0, 0)
    scales = scales.masked_fill(~torch.isfinite(peak), SCALE_NAN).to(torch.uint8)
    factor = decode_scale(scales).nan_to_num(nan=1.0)
    codes = _nearest_codes(groups.nan_to_num() / factor.unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _magnitudes(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=codes.device)
    return table[(codes & 7).long()]


def _nearest_codes(scaled: torch.Tensor) -> torch.Tensor:
    """Code of each value in units of its scale: nearest magnitude, ties to the even code, saturating."""
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for index, midpoint in enumerate(ROUND_UP_AT):
        upper_is_even = (index + 1) % 2 == 0
        code += (size >= midpoint if upper_is_even else size > midpoint).to(torch.uint8)
    return code | (torch.signbit(scaled).to(torch.uint8) << 3)
