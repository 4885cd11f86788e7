"""A gated MLP with SiTU: `down(SiTU(gate(x), up(x)))`; the shared expert, and layer 0's dense FFN.

SiTU(g, u) = 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25), in fp32 on bf16 inputs.
"""

from collections.abc import Mapping

import torch

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

__all__ = ["SPEC", "oracle", "situ", "stock"]

REGIMES = (*BASE_REGIMES, "dense", "strided_rows", "near_overflow", "special_rows")
GATE_BETA = 4.0
LINEAR_BETA = 25.0


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """fp32 SiTU of bf16 gate and up."""
    g, u = gate.float(), up.float()
    return (
        GATE_BETA * torch.tanh(g / GATE_BETA) * torch.sigmoid(g) * (LINEAR_BETA * torch.tanh(u / LINEAR_BETA))
    )


def stock(
    *, x: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor, out: torch.Tensor
) -> None:
    """bf16 GEMMs, the activation rounded to bf16 between them."""
    gate, up = linear(x, gate_up_weight).chunk(2, dim=-1)
    out.copy_(linear(situ(gate, up).to(torch.bfloat16), down_weight))


def oracle(
    *, x: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor, **_: object
) -> Mapping[str, torch.Tensor]:
    """Float64, nothing rounded."""
    inter = down_weight.shape[1]
    both = x.double() @ gate_up_weight.double().T
    gate, up = both[:, :inter], both[:, inter:]
    soft_gate = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate))
    soft_up = 25 * torch.tanh(up / 25)
    return {"out": (soft_gate * soft_up) @ down_weight.double().T}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """The shared expert's shard, or layer 0's with `dense`."""
    require_regime("situ_mlp", REGIMES, regime)
    hidden = cell.shapes.model.hidden
    inter = cell.shapes.dense_inter if regime == "dense" else cell.shapes.shared_inter
    x = activation(regime, (cell.tokens, hidden), generator, device, tiny=1e-15, source="situ_mlp.x")
    if regime == "near_overflow":
        x = (x.float() * NEAR_OVERFLOW).to(x.dtype)
    if regime == "special_rows":
        x = with_special_rows(x)
    return {
        "x": with_row_gap(x) if regime == "strided_rows" else x,
        "gate_up_weight": weight((2 * inter, hidden), generator, device, scale=2.0 * hidden**-0.5),
        "down_weight": weight((hidden, inter), generator, device),
        "out": poisoned((cell.tokens, hidden), device),
    }


SPEC = OpSpec(
    name="situ_mlp",
    params=(
        Param("x", Role.ACTIVATION),
        Param("gate_up_weight", Role.WEIGHT),
        Param("down_weight", Role.WEIGHT),
        Param("out", Role.OUTPUT),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
