"""Expert selection: sigmoid scores, top-k of score + bias, renormalised weights.

A tie goes to the lower id. A NaN logit counts as score 0 and is selected last, as is an expert whose bias is
NaN. Ids come in order of falling score + bias; the weights use the scores without bias: weight = scale *
score / (sum of the selected scores + 1e-20).
"""

from collections.abc import Mapping

import torch

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import BASE_REGIMES, activation, poisoned, require_regime

__all__ = ["SPEC", "oracle", "stock"]

REGIMES = (*BASE_REGIMES, "edge_ties", "all_tied", "nan_row", "infinite_logits")
WEIGHT_FLOOR = 1e-20
SMALLEST_GAP = 4e-6
"""Distinct selection keys among the first k + 1 differ by more, 30 times fp32's rounding of a score, so that
the right ids are the same at any sane precision. Exact ties have bitwise equal inputs.
"""
BIAS_SPAN = 0.2
TIED_EXPERTS = 4


def stock(
    *,
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
) -> None:
    """fp32 scores and a stable sort."""
    is_nan = torch.isnan(logits)
    scores = torch.sigmoid(logits).masked_fill(is_nan, 0.0)
    keys = (scores + bias).masked_fill(is_nan | torch.isnan(bias), -torch.inf)
    chosen = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, : ids.shape[1]]
    picked = scores.gather(1, chosen)
    ids.copy_(chosen)
    weights.copy_(picked / (picked.sum(-1, keepdim=True) + WEIGHT_FLOOR) * scale)


def oracle(
    *, logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, scale: float, **_: object
) -> Mapping[str, torch.Tensor]:
    """Exact ids, and float64 weights, one row at a time."""
    true_ids = torch.empty(ids.shape, dtype=torch.int32)
    true_weights = torch.empty(ids.shape, dtype=torch.float64)
    wide_bias = bias.double().cpu()
    for row, logit in enumerate(logits.double().cpu()):
        score = torch.where(torch.isnan(logit), 0.0, 1.0 / (1.0 + torch.exp(-logit)))
        key = torch.where(torch.isnan(logit) | torch.isnan(wide_bias), -torch.inf, score + wide_bias).tolist()
        ranking = sorted(range(len(key)), key=lambda expert: (-key[expert], expert))
        chosen = ranking[: ids.shape[1]]
        true_ids[row] = torch.tensor(chosen, dtype=torch.int32)
        true_weights[row] = scale * score[chosen] / (score[chosen].sum() + WEIGHT_FLOOR)
    return {"ids": true_ids.to(ids.device), "weights": true_weights.to(ids.device)}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Logits over all experts, whose right order no rounding can change; biases differ by fixed steps."""
    require_regime("router", REGIMES, regime)
    model = cell.shapes.model
    experts, top_k = model.experts, model.top_k
    bias = (torch.randperm(experts, generator=generator) / experts - 0.5) * BIAS_SPAN
    tied = torch.randperm(experts, generator=generator)[: min(TIED_EXPERTS, experts)]
    if regime == "edge_ties":
        bias[tied] = 0.0
    if regime == "all_tied":
        bias = torch.full((experts,), 0.125)
    rows: list[torch.Tensor] = []
    while len(rows) < cell.tokens:
        row = _row(regime, len(rows), bias, tied, top_k, generator)
        if _is_unambiguous(row, bias, top_k):
            rows.append(row)
    return {
        "logits": torch.stack(rows).to(device),
        "bias": bias.to(device),
        "ids": poisoned((cell.tokens, top_k), device, torch.int32),
        "weights": poisoned((cell.tokens, top_k), device, torch.float32),
        "scale": model.routed_scale,
    }


def _row(
    regime: str, index: int, bias: torch.Tensor, tied: torch.Tensor, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """fp32 logits of one token."""
    experts = bias.shape[0]
    shape, cpu = (1, experts), torch.device("cpu")
    whole = activation(regime, shape, generator, cpu, large=30.0, dtype=torch.float32, source="router.logits")
    row = whole[0].clone()
    if regime == "recorded":  # a row that comes twice must not be ambiguous twice
        row += 0.01 * torch.randn(experts, generator=generator)
    if regime == "edge_ties":
        row[tied] = _edge_logit(row, bias, tied, top_k)
    elif regime == "all_tied":
        row[:] = row[0]
    elif regime == "nan_row" and index % 2 == 0:
        row[torch.randperm(experts, generator=generator)[: max(1, experts // 8)]] = torch.nan
    elif regime == "nan_row":
        row[top_k // 2 :] = torch.nan
        if index % 4 == 3:
            row[:] = torch.nan
    elif regime == "infinite_logits":
        order = torch.randperm(experts, generator=generator)
        row[order[: experts // 4]] = torch.inf
        row[order[experts // 4 : experts // 2]] = -torch.inf
    return row


def _edge_logit(row: torch.Tensor, bias: torch.Tensor, tied: torch.Tensor, top_k: int) -> float:
    """Logit that puts the tied experts (bias 0) where some of them fit into the top k and some do not."""
    others = torch.ones_like(bias, dtype=torch.bool)
    others[tied] = False
    keys = (torch.sigmoid(row[others].double()) + bias[others].double()).sort(descending=True).values
    above = max(0, top_k - len(tied) // 2)
    low = float(keys[above]) if above < len(keys) else 0.0
    high = float(keys[above - 1]) if above > 0 else low + 0.05
    score = min(max((low + high) / 2, 0.01), 0.99)
    return float(torch.logit(torch.tensor(score, dtype=torch.float64)))


def _is_unambiguous(row: torch.Tensor, bias: torch.Tensor, top_k: int) -> bool:
    """Whether neighbouring keys down to the edge are bitwise ties or too far apart for rounding to bridge."""
    finite = ~torch.isnan(row)
    logits, biases = row[finite].double(), bias[finite].double()
    keys = torch.sigmoid(logits) + biases
    order = torch.sort(keys, descending=True, stable=True).indices[: top_k + 1]
    gaps = keys[order][:-1] - keys[order][1:]
    same = (logits[order][:-1] == logits[order][1:]) & (biases[order][:-1] == biases[order][1:])
    return bool((same | (gaps > SMALLEST_GAP)).all())


SPEC = OpSpec(
    name="router",
    params=(
        Param("logits", Role.ACTIVATION),
        Param("bias", Role.WEIGHT),
        Param("ids", Role.OUTPUT, is_exact=True),
        Param("weights", Role.OUTPUT),
        Param("scale", Role.SCALAR),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
