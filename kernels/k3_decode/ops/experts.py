"""The routed experts: for each selected expert a SiTU MLP on the latent, summed with the router's weights.

Weights are MXFP4 (`ops/mxfp4.py`). Rows 0..I-1 of `w13` are the gate (w1), I..2I-1 the up-projection (w3). An
id below 0 is skipped. On a tensor-parallel rank I is the rank's share and the sum is partial.

Numeric scope. The latent comes of a normed row, so its values are near one or all zero, and |SiTU| is at
most 100. An implementation may keep hidden values in any 16-bit format that is exact to 11 bits from 2^-23
up and to 2^-34 absolutely below; bf16, as stock has it, keeps 8 bits down to 2^-126. Latents of some 1e-3
are the smallest at which both mean the same, and that is what the regime `tiny` draws. Below, an expert's
output is right to 2^-34 times the sum of |w2| of its row.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import (
    BASE_REGIMES,
    POOL_ELEMENTS,
    activation,
    poisoned,
    require_regime,
    spread,
    with_row_gap,
    with_special_rows,
)
from k3_decode.ops.mxfp4 import SCALE_BIAS, dequantise
from k3_decode.ops.products import linear
from k3_decode.ops.situ_mlp import situ
from k3_decode.shapes import MXFP4_GROUP

__all__ = ["SPEC", "WeightsOf", "combine", "oracle", "stock", "unpacked"]

REGIMES = (*BASE_REGIMES, "one_expert_set", "skipped_ids", "mixed_scales", "strided_rows", "special_rows")
TINY_LATENT = 2e-3
"""Smallest latents of the op's numeric scope: hidden values near 2e-6."""
CODE_RMS = 2.926
"""Root mean square of an evenly drawn E2M1 value."""
WeightsOf: TypeAlias = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""An expert's bf16 weights (w13, w2) by its id."""


def stock(
    *,
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Expert by expert: weights to bf16, bf16 GEMMs, bf16 between them; the weighted sum in fp32."""
    out.copy_(combine(latent, ids, weights, unpacked(w13, w13_scale, w2, w2_scale), situ))


def unpacked(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> WeightsOf:
    """bf16 weights of one expert at a time."""

    def weights_of(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = dequantise(w13[expert], w13_scale[expert], torch.bfloat16)
        return first, dequantise(w2[expert], w2_scale[expert], torch.bfloat16)

    return weights_of


def combine(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    weights_of: WeightsOf,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """bf16 weighted sum over the selected experts, whose bf16 weights (w13, w2) `weights_of` gives."""
    total = torch.zeros(latent.shape, dtype=torch.float32, device=latent.device)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        first, second = weights_of(expert)
        gate, up = linear(latent[row], first).chunk(2, -1)
        result = linear(activation(gate, up).to(torch.bfloat16), second)
        total.index_add_(0, row, result.float() * weights[row, place].unsqueeze(1))
    return total.to(torch.bfloat16)


def oracle(
    *,
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64, nothing rounded; weights as the format says."""
    inter = w13.shape[1] // 2
    out = torch.zeros(latent.shape, dtype=torch.float64, device=latent.device)
    for expert in sorted({e for row in ids.tolist() for e in row if e >= 0}):
        first = dequantise(w13[expert], w13_scale[expert])
        second = dequantise(w2[expert], w2_scale[expert])
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        z = latent[row].double()
        gate, up = z @ first[:inter].T, z @ first[inter:].T
        h = (4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate))) * (25 * torch.tanh(up / 25))
        out.index_add_(0, row, weights[row, place].double().unsqueeze(1) * (h @ second.T))
    return {"out": out}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Random codes, scales that keep outputs near one, distinct experts a row."""
    require_regime("experts", REGIMES, regime)
    model, inter = cell.shapes.model, cell.shapes.expert_inter
    tokens, latent, experts, top_k = cell.tokens, model.latent, model.experts, model.top_k
    x = activation(regime, (tokens, latent), generator, device, tiny=TINY_LATENT, source="experts.latent")
    if regime == "special_rows":
        x = with_special_rows(x)
    if regime == "one_expert_set":
        ids = torch.randperm(experts, generator=generator)[:top_k].expand(tokens, top_k)
    else:
        ids = torch.rand((tokens, experts), generator=generator).argsort(1)[:, :top_k]
    ids = ids.to(torch.int32).contiguous()
    if regime == "skipped_ids":
        ids[::2, 0] = -1
        ids[-1, top_k // 2 :] = -1
    weights = torch.rand((tokens, top_k), generator=generator) + 0.05
    weights = weights / weights.sum(1, keepdim=True)
    jitter = 6 if regime == "mixed_scales" else 1
    return {
        "latent": with_row_gap(x) if regime == "strided_rows" else x,
        "ids": ids.to(device),
        "weights": weights.to(device),
        "w13": _codes((experts, 2 * inter, latent // 2), generator, device),
        "w13_scale": _scales((experts, 2 * inter, latent // MXFP4_GROUP), jitter, generator, device),
        "w2": _codes((experts, latent, inter // 2), generator, device),
        "w2_scale": _scales((experts, latent, inter // MXFP4_GROUP), jitter, generator, device),
        "out": poisoned((tokens, latent), device),
    }


def _codes(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    count = min(math.prod(shape), POOL_ELEMENTS)
    return spread(torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8), shape, device)


def _scales(
    shape: tuple[int, ...], jitter: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Scale bytes within `jitter` of the one that gives weights of 1 / sqrt(K)."""
    width = shape[-1] * MXFP4_GROUP
    middle = SCALE_BIAS + round(math.log2(width**-0.5 / CODE_RMS))
    count = min(math.prod(shape), POOL_ELEMENTS)
    pool = torch.randint(
        middle - jitter, middle + jitter + 1, (count,), generator=generator, dtype=torch.int32
    )
    return spread(pool.to(torch.uint8), shape, device)


SPEC = OpSpec(
    name="experts",
    params=(
        Param("latent", Role.ACTIVATION),
        Param("ids", Role.ACTIVATION),
        Param("weights", Role.ACTIVATION),
        Param("w13", Role.WEIGHT),
        Param("w13_scale", Role.WEIGHT),
        Param("w2", Role.WEIGHT),
        Param("w2_scale", Role.WEIGHT),
        Param("out", Role.OUTPUT),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
