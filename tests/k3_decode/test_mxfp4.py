"""MXFP4 as the format says: every (scale byte, code) pair, and the quantiser's rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_decode.cpu.experts import unpack
from k3_decode.ops.mxfp4 import decode_scale, dequantise, quantise, unpack_codes

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EVERY_CODE = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32)


def expected(byte: int, code: int) -> float:
    """The value by the OCP specification, in Python's own arithmetic."""
    if byte == 255:
        return math.nan
    return math.copysign(MAGNITUDES[code & 7], -1.0 if code & 8 else 1.0) * 2.0 ** (byte - 127)


def packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@pytest.mark.parametrize("byte", range(256))
def test_every_pair_decodes_as_the_format_says(byte: int) -> None:
    values = dequantise(packed(EVERY_CODE), torch.tensor([[byte]], dtype=torch.uint8))[0, :16].tolist()
    for code, value in enumerate(values):
        want = expected(byte, code)
        assert value == want or (math.isnan(value) and math.isnan(want))
        assert math.copysign(1, value) == math.copysign(1, want) or math.isnan(want)


@pytest.mark.parametrize(
    ("byte", "exact_codes", "infinite_codes"),
    [(252, 8, 0), (253, 6, 2), (254, 4, 4)],
)
def test_bf16_overflows_only_at_the_two_largest_scales(
    byte: int, exact_codes: int, infinite_codes: int
) -> None:
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    values = dequantise(packed(EVERY_CODE), scale, torch.bfloat16)[0, :8]
    assert int(torch.isfinite(values).sum()) == exact_codes
    assert int(torch.isinf(values).sum()) == infinite_codes
    truth = dequantise(packed(EVERY_CODE), scale)[0, :exact_codes]
    assert torch.equal(values[:exact_codes].double(), truth)


def test_the_smallest_scales_give_subnormals_exactly() -> None:
    for byte in (0, 1, 2):
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        assert torch.equal(
            dequantise(packed(EVERY_CODE), scale, torch.bfloat16).double(),
            dequantise(packed(EVERY_CODE), scale),
        )


def test_the_cpu_table_decodes_every_pair_like_the_codec() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8).view(256, 1)
    codes = packed(EVERY_CODE).expand(256, 16)
    torch.testing.assert_close(
        unpack(codes, bytes_), dequantise(codes, bytes_, torch.float32), rtol=0, atol=0, equal_nan=True
    )


def test_the_low_nibble_comes_first() -> None:
    assert unpack_codes(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0), (0.26, 1), (0.75, 2), (1.25, 2), (1.26, 3), (1.75, 4), (2.5, 4), (2.6, 5), (3.5, 6),
        (5.0, 6), (5.1, 7), (7.9, 7), (-0.25, 8), (-3.5, 14),
    ],
)  # fmt: skip
def test_quantiser_rounds_to_the_nearest_code_and_ties_to_even(value: float, code: int) -> None:
    values = torch.zeros(32)
    values[0], values[1] = value, 4.0  # largest magnitude 4 to 7.9: scale 2^0
    codes, scales = quantise(values)
    assert scales.tolist() == [127]
    assert unpack_codes(codes)[0].item() == code


def test_quantiser_marks_zeros_and_non_finite_groups() -> None:
    values = torch.zeros(3, 32)
    values[1, 5], values[2, 7] = math.nan, math.inf
    codes, scales = quantise(values)
    assert scales.flatten().tolist() == [0, 255, 255]
    assert not codes[0].any()


def test_quantiser_refuses_a_row_that_is_no_whole_number_of_groups() -> None:
    with pytest.raises(ValueError, match="48, not a multiple of the group of 32"):
        quantise(torch.zeros(48))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-130, 124))
def test_quantised_values_stay_within_half_a_step(seed: int, exponent: int) -> None:
    """Up to 4 units of the scale a step is at most 1 (error 0.5), to 6 it is 2; above, values saturate."""
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent
    codes, scales = quantise(values)
    unit = decode_scale(scales).repeat_interleave(32, dim=-1).view(8, 32)
    gap = (dequantise(codes, scales) - values).abs() / unit
    size = values.abs() / unit
    limit = torch.where(size < 4, 0.5, torch.where(size < 6, 1.0, 2.0))
    assert bool((gap <= limit).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_quantising_what_was_dequantised_changes_no_value(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (4, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 250, (4, 2), generator=generator, dtype=torch.uint8)
    once = dequantise(codes, scales)
    again = dequantise(*quantise(once))
    assert torch.equal(again, once)
