"""A linear map of every row: `out = x @ weight.T`, accumulated in fp32.

It serves the packed input projections, the output projections and the language-model head; with an fp32 `out`
nothing is rounded but the sum.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import (
    BASE_REGIMES,
    NEAR_OVERFLOW,
    activation,
    poisoned,
    require_regime,
    weight,
    with_row_gap,
    with_special_rows,
)
from k3_decode.ops.products import linear

__all__ = ["SPEC", "oracle", "stock"]

REGIMES = (
    *BASE_REGIMES,
    "mla_in",
    "output_projection",
    "fp32_out",
    "strided_rows",
    "near_overflow",
    "special_rows",
)
"""Shapes of the packed KDA input, except `mla_in` and `output_projection`; `fp32_out` is the vocabulary shard
(at most 4096 rows of it).
"""


def stock(*, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """A bf16 GEMM, or an fp32 one where the output is fp32."""
    if out.dtype == torch.float32:
        out.copy_(functional.linear(x.float(), weight.float()))
    else:
        out.copy_(linear(x, weight))


def oracle(*, x: torch.Tensor, weight: torch.Tensor, **_: object) -> Mapping[str, torch.Tensor]:
    """Float64 product."""
    return {"out": torch.einsum("bk,mk->bm", x.double(), weight.double())}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Arguments for the rank's packed KDA projection, or for the one the regime names."""
    require_regime("projection", REGIMES, regime)
    shapes, hidden = cell.shapes, cell.shapes.model.hidden
    rows, width = {
        "mla_in": (shapes.mla_in_rows, hidden),
        "output_projection": (hidden, shapes.channels),
        "fp32_out": (min(4096, shapes.model.vocab // shapes.tp), hidden),
    }.get(regime, (shapes.kda_in_rows, hidden))
    x = activation(regime, (cell.tokens, width), generator, device, source="projection.x")
    if regime == "near_overflow":
        x = (x.float() * NEAR_OVERFLOW).to(x.dtype)
    if regime == "special_rows":
        x = with_special_rows(x)
    return {
        "x": with_row_gap(x) if regime == "strided_rows" else x,
        "weight": weight((rows, width), generator, device),
        "out": poisoned(
            (cell.tokens, rows), device, torch.float32 if regime == "fp32_out" else torch.bfloat16
        ),
    }


SPEC = OpSpec(
    name="projection",
    params=(Param("x", Role.ACTIVATION), Param("weight", Role.WEIGHT), Param("out", Role.OUTPUT)),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
