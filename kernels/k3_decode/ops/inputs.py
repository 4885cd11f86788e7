"""What the ops are tried on: seeded values by regime, and outputs that hold poison before a call.

Invariant: values depend on the generator alone, which lives on the CPU, so that a seed means the same data on
every device. Zeros are never the data: a kernel that returns nothing must not look right. Ops choose shapes
and add regimes of their own.
"""

import math

import torch

from k3_decode.ops.recorded import recorded_rows

__all__ = [
    "BASE_REGIMES",
    "activation",
    "poisoned",
    "require_regime",
    "spread",
    "uniform",
    "weight",
    "with_row_gap",
    "with_special_rows",
]

BASE_REGIMES = ("gaussian", "heavy_tail", "large", "tiny", "constant_rows", "recorded")
"""Regimes of every op: unit normals, log-normal outliers, far above and far below one, rows of one value, and
rows of real steps."""
LARGE_SCALE = 1024.0
TINY_SCALE = 1e-30
"""A normal bf16 number whose square underflows in fp32, so that eps decides every norm."""
SUBNORMAL = 2.0**-130
NEAR_OVERFLOW, NEAR_OVERFLOW_OF_SQUARES = 2.0**121, 2.0**56
"""Sums of products with weights, or of the squares of a row, stay below 2^128, where fp32 and bf16 end."""
POOL_ELEMENTS = (1 << 24) + 43
"""Prime length of the pool that fills larger weights, so that no two experts or rows get the same values."""


def require_regime(op: str, regimes: tuple[str, ...], regime: str) -> None:
    """Raises `ValueError` for a regime that the op does not know."""
    if regime not in regimes:
        raise ValueError(f"{op} knows no input regime {regime!r}; it knows {', '.join(regimes)}")


def activation(
    regime: str,
    shape: tuple[int, ...],
    generator: torch.Generator,
    device: torch.device,
    *,
    large: float = LARGE_SCALE,
    tiny: float = TINY_SCALE,
    dtype: torch.dtype = torch.bfloat16,
    source: str = "",
) -> torch.Tensor:
    """Values of a regime; regimes that are special to one op get unit normals. The last axis is the row.

    An op whose output is a product of two activations asks for a `tiny` whose square a bf16 can hold.
    `source` names what was recorded, such as `projection.x`.
    """
    values = _normal(shape, generator)
    if regime == "heavy_tail":
        values = values.sign() * torch.exp(2.0 * _normal(shape, generator))
    elif regime == "large":
        values = values * large
    elif regime == "tiny":
        values = values * tiny
        values.view(-1)[::7] = SUBNORMAL
    elif regime == "constant_rows":
        values = values[..., :1].expand(shape)
    elif regime == "recorded" and source:
        values = recorded_rows(source, shape, generator)
    return values.to(dtype).to(device).contiguous()


def weight(
    shape: tuple[int, ...],
    generator: torch.Generator,
    device: torch.device,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Normal values times `scale` (default: 1 / sqrt of the last axis)."""
    factor = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
    pool = _normal((min(math.prod(shape), POOL_ELEMENTS),), generator) * factor
    return spread(pool.to(dtype), shape, device)


def spread(pool: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A tensor of `shape` on `device` that repeats a flat pool; the pool's length is prime or the tensor's
    own.
    """
    count = math.prod(shape)
    flat = pool.to(device)
    if count > flat.numel():
        flat = flat.repeat(-(-count // flat.numel()))
    return flat[:count].view(shape)


def uniform(
    shape: tuple[int, ...], low: float, high: float, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """fp32 values evenly spread in [low, high)."""
    return (torch.rand(shape, generator=generator) * (high - low) + low).to(device)


def poisoned(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """An output buffer no call has written: NaN, or -1 for integers."""
    return torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype, device=device)


def with_row_gap(rows: torch.Tensor, gap: int = 64) -> torch.Tensor:
    """The same rows [B, width] at a row stride of width + gap, with NaN between them."""
    wide = poisoned((rows.shape[0], rows.shape[1] + gap), rows.device, rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def with_special_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows, a third of which hold a NaN and a third an infinity: what is not finite stays in its row, and
    is not finite where the oracle's value is not.
    """
    rows[::3, 1] = math.nan
    rows[1::3, 2] = math.inf
    return rows


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)
