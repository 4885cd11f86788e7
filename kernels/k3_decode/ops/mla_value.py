"""The end of MLA: merge of partial attentions, value up-projection, output gate.

Each of S shards of the context gives a latent and the logarithm, to the base `lse_base`, of the sum of its
exponentials. w_s = base ** (lse_s - max lse), normalised; a shard whose lse is NaN or infinite had no keys
and has weight 0, whatever its latent holds; with no keys at all the merge is zeros. out = bf16(merged @
uv_weight) * sigmoid(gate).
"""

import math
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
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mla_query import KV_LORA
from k3_decode.ops.products import batched

__all__ = ["SPEC", "merge", "oracle", "stock"]

REGIMES = (
    *BASE_REGIMES, "one_shard", "empty_shards", "no_keys", "uneven_shards", "gate_in_packed_rows",
    "near_overflow", "special_rows", "base_two",
)  # fmt: skip
SHARDS = 4
SHARD_SCALES = (1.0, 8.0, 0.125, 2.0)
V_DIM = 128


def merge(partial: torch.Tensor, partial_lse: torch.Tensor, base: LogBase) -> torch.Tensor:
    """Float64 merge [B,H,C] of partials [S,B,H,C] whose lse [S,B,H] is a logarithm to `base`."""
    lse = partial_lse.double()
    has_keys = torch.isfinite(lse)
    peak = torch.where(has_keys, lse, -torch.inf).amax(dim=0)
    merged = torch.zeros(partial.shape[1:], dtype=torch.float64, device=partial.device)
    total = torch.zeros(peak.shape, dtype=torch.float64, device=partial.device)
    for shard in range(partial.shape[0]):
        share = torch.where(has_keys[shard], base.value ** (lse[shard] - peak), 0.0)
        value = torch.where(has_keys[shard].unsqueeze(-1), partial[shard].double(), 0.0)
        merged += share.unsqueeze(-1) * value
        total += share
    return torch.where((total > 0).unsqueeze(-1), merged / total.unsqueeze(-1), 0.0)


def stock(
    *,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    uv_weight: torch.Tensor,
    gate: torch.Tensor,
    lse_base: LogBase,
    out: torch.Tensor,
) -> None:
    """fp32 merge, rounded; a bf16 product, rounded; then the gate."""
    has_keys = torch.isfinite(partial_lse)
    lse = partial_lse.masked_fill(~has_keys, -torch.inf)
    peak = lse.amax(0)
    share = torch.exp((lse - peak.masked_fill(peak == -torch.inf, 0.0)) * math.log(lse_base))
    total = share.sum(0)
    share = share / torch.where(total == 0, 1.0, total)
    values = partial.float().masked_fill(~has_keys.unsqueeze(-1), 0.0)
    latent = (share.unsqueeze(-1) * values).sum(0).to(torch.bfloat16)
    heads = batched(latent.transpose(0, 1), uv_weight).transpose(0, 1).flatten(1)
    out.copy_((heads.float() * torch.sigmoid(gate.float())).to(torch.bfloat16))


def oracle(
    *,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    uv_weight: torch.Tensor,
    gate: torch.Tensor,
    lse_base: LogBase,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64, nothing rounded."""
    merged = merge(partial, partial_lse, LogBase(lse_base))
    value = torch.einsum("bhc,hcv->bhv", merged, uv_weight.double()).flatten(1)
    return {"out": value / (1.0 + torch.exp(-gate.double()))}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Partials of four shards (one with `one_shard`) of unlike weight."""
    require_regime("mla_value", REGIMES, regime)
    heads, tokens, width = cell.shapes.heads, cell.tokens, cell.shapes.channels
    shards = 1 if regime == "one_shard" else SHARDS
    partial = activation(
        regime, (shards, tokens, heads, KV_LORA), generator, device, source="mla_value.partial"
    )
    if regime in ("uneven_shards", "base_two"):  # shards of unlike keys: a wrong share shows at once
        scales = torch.tensor(SHARD_SCALES).view(-1, 1, 1, 1)
        partial = (partial.float() * scales.to(device)).to(partial.dtype)
    if regime == "near_overflow":
        partial = (partial.float() * NEAR_OVERFLOW).to(partial.dtype)
    spread_of_lse = 8.0 if regime in ("uneven_shards", "base_two") else 1.0
    lse = torch.randn((shards, tokens, heads), generator=generator) * spread_of_lse + 6.0
    if regime == "empty_shards":
        lse[1], lse[2, ::2] = -torch.inf, torch.nan
        partial[1] = torch.nan
    if regime == "no_keys":
        lse[:, ::2] = -torch.inf
        partial[:, ::2] = torch.nan
    gate = activation(regime, (tokens, width), generator, device, large=16.0, source="mla_value.gate")
    if regime == "special_rows":
        gate = with_special_rows(gate)
    return {
        "partial": partial,
        "partial_lse": lse.to(device),
        "uv_weight": weight((heads, KV_LORA, V_DIM), generator, device, scale=KV_LORA**-0.5),
        "gate": with_row_gap(gate, 640) if regime == "gate_in_packed_rows" else gate,
        "lse_base": LogBase.TWO if regime == "base_two" else LogBase.E,
        "out": poisoned((tokens, width), device),
    }


SPEC = OpSpec(
    name="mla_value",
    params=(
        Param("partial", Role.ACTIVATION),
        Param("partial_lse", Role.ACTIVATION),
        Param("uv_weight", Role.WEIGHT),
        Param("gate", Role.ACTIVATION),
        Param("lse_base", Role.SCALAR),
        Param("out", Role.OUTPUT),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
