"""The end of the MoE: RMSNorm of the combined latent, up-projection, plus the shared expert's output.

The latent has been reduced over ranks before, because the norm is not linear.
"""

from collections.abc import Mapping

import torch

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import (
    BASE_REGIMES,
    NEAR_OVERFLOW_OF_SQUARES,
    activation,
    poisoned,
    require_regime,
    weight,
    with_row_gap,
    with_special_rows,
)
from k3_decode.ops.norms import rms_norm
from k3_decode.ops.products import linear

__all__ = ["SPEC", "oracle", "stock"]

REGIMES = (*BASE_REGIMES, "sharded", "strided_rows", "near_overflow", "special_rows")


def stock(
    *,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """The normed latent, the product and the sum are each rounded to bf16."""
    out.copy_(linear(rms_norm(latent, norm_weight, eps), up_weight) + shared)


def oracle(
    *,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    eps: float,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64, nothing rounded."""
    wide = latent.double()
    root = torch.sqrt((wide * wide).mean(dim=1, keepdim=True) + eps)
    normed = wide / root * norm_weight.double()
    return {"out": shared.double() + normed @ up_weight.double().T}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """The whole up-projection; `sharded` takes one rank's rows of it."""
    require_regime("latent_tail", REGIMES, regime)
    model = cell.shapes.model
    rows = model.hidden // cell.shapes.tp if regime == "sharded" else model.hidden
    latent = activation(regime, (cell.tokens, model.latent), generator, device, source="latent_tail.latent")
    if regime == "near_overflow":
        latent = (latent.float() * NEAR_OVERFLOW_OF_SQUARES).to(latent.dtype)
    if regime == "special_rows":
        latent = with_special_rows(latent)
    shared = activation(regime, (cell.tokens, rows), generator, device, source="latent_tail.shared")
    return {
        "latent": with_row_gap(latent) if regime == "strided_rows" else latent,
        "norm_weight": weight((model.latent,), generator, device, scale=0.2) + 1.0,
        "up_weight": weight((rows, model.latent), generator, device),
        "shared": with_row_gap(shared) if regime == "strided_rows" else shared,
        "out": poisoned((cell.tokens, rows), device),
        "eps": model.norm_eps,
    }


SPEC = OpSpec(
    name="latent_tail",
    params=(
        Param("latent", Role.ACTIVATION),
        Param("norm_weight", Role.WEIGHT),
        Param("up_weight", Role.WEIGHT),
        Param("shared", Role.ACTIVATION),
        Param("out", Role.OUTPUT),
        Param("eps", Role.SCALAR),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
