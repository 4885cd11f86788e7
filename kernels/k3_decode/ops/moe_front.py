"""What the MoE reads of its input: router logits and the latent down-projection, in one pass over x.

The logits stay fp32, because selection compares them; the latent is bf16.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import BASE_REGIMES, activation, poisoned, require_regime, weight, with_row_gap
from k3_decode.ops.products import linear

__all__ = ["SPEC", "oracle", "stock"]

REGIMES = (*BASE_REGIMES, "sharded", "strided_rows")


def stock(
    *,
    x: torch.Tensor,
    router_weight: torch.Tensor,
    down_weight: torch.Tensor,
    logits: torch.Tensor,
    latent: torch.Tensor,
) -> None:
    """An fp32 GEMM for the logits and a bf16 one for the latent."""
    logits.copy_(functional.linear(x.float(), router_weight.float()))
    latent.copy_(linear(x, down_weight))


def oracle(
    *, x: torch.Tensor, router_weight: torch.Tensor, down_weight: torch.Tensor, **_: object
) -> Mapping[str, torch.Tensor]:
    """Float64 products."""
    wide = x.double()
    return {"logits": wide @ router_weight.double().T, "latent": wide @ down_weight.double().T}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Whole router and down-projection; `sharded` takes one rank's rows of both."""
    require_regime("moe_front", REGIMES, regime)
    model = cell.shapes.model
    parts = cell.shapes.tp if regime == "sharded" else 1
    experts, latent = -(-model.experts // parts), -(-model.latent // parts)
    x = activation(regime, (cell.tokens, model.hidden), generator, device)
    return {
        "x": with_row_gap(x) if regime == "strided_rows" else x,
        "router_weight": weight((experts, model.hidden), generator, device),
        "down_weight": weight((latent, model.hidden), generator, device),
        "logits": poisoned((cell.tokens, experts), device, torch.float32),
        "latent": poisoned((cell.tokens, latent), device),
    }


SPEC = OpSpec(
    name="moe_front",
    params=(
        Param("x", Role.ACTIVATION),
        Param("router_weight", Role.WEIGHT),
        Param("down_weight", Role.WEIGHT),
        Param("logits", Role.OUTPUT),
        Param("latent", Role.OUTPUT),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
