"""What the MoE reads of its input in one pass over x: router logits, the latent down-projection, and the
shared expert's hidden values, SiTU of its gate and up products.

The logits stay fp32, because selection compares them; latent and hidden are bf16. Without `gate_up_weight`
there is no hidden.
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
from k3_decode.ops.situ_mlp import situ

__all__ = ["SPEC", "oracle", "stock"]

REGIMES = (*BASE_REGIMES, "sharded", "strided_rows", "near_overflow", "special_rows")


def stock(
    *,
    x: torch.Tensor,
    router_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_weight: torch.Tensor | None = None,
    logits: torch.Tensor,
    latent: torch.Tensor,
    hidden: torch.Tensor | None = None,
) -> None:
    """An fp32 GEMM for the logits, bf16 ones for the others; SiTU of bf16 products, rounded to bf16."""
    logits.copy_(functional.linear(x.float(), router_weight.float()))
    latent.copy_(linear(x, down_weight))
    if gate_up_weight is not None and hidden is not None:
        gate, up = linear(x, gate_up_weight).chunk(2, dim=-1)
        hidden.copy_(situ(gate, up).to(torch.bfloat16))


def oracle(
    *,
    x: torch.Tensor,
    router_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_weight: torch.Tensor | None = None,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64 products, nothing rounded."""
    wide = x.double()
    found = {"logits": wide @ router_weight.double().T, "latent": wide @ down_weight.double().T}
    if gate_up_weight is not None:
        gate, up = (wide @ gate_up_weight.double().T).chunk(2, dim=-1)
        found["hidden"] = (4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate))) * (25 * torch.tanh(up / 25))
    return found


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Whole router and down-projection (`sharded`: one rank's rows), and the rank's shared expert."""
    require_regime("moe_front", REGIMES, regime)
    model = cell.shapes.model
    parts = cell.shapes.tp if regime == "sharded" else 1
    experts, latent = -(-model.experts // parts), -(-model.latent // parts)
    inter = cell.shapes.shared_inter
    x = activation(regime, (cell.tokens, model.hidden), generator, device, tiny=1e-15, source="moe_front.x")
    if regime == "near_overflow":
        x = (x.float() * NEAR_OVERFLOW).to(x.dtype)
    if regime == "special_rows":
        x = with_special_rows(x)
    return {
        "x": with_row_gap(x) if regime == "strided_rows" else x,
        "router_weight": weight((experts, model.hidden), generator, device),
        "down_weight": weight((latent, model.hidden), generator, device),
        "gate_up_weight": weight(
            (2 * inter, model.hidden), generator, device, scale=2.0 * model.hidden**-0.5
        ),
        "logits": poisoned((cell.tokens, experts), device, torch.float32),
        "latent": poisoned((cell.tokens, latent), device),
        "hidden": poisoned((cell.tokens, inter), device),
    }


SPEC = OpSpec(
    name="moe_front",
    params=(
        Param("x", Role.ACTIVATION),
        Param("router_weight", Role.WEIGHT),
        Param("down_weight", Role.WEIGHT),
        Param("gate_up_weight", Role.WEIGHT),
        Param("logits", Role.OUTPUT),
        Param("latent", Role.OUTPUT),
        Param("hidden", Role.OUTPUT),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
