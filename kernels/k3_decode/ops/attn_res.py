"""Attention residuals in block form, with the sublayer's input RMSNorm (Kimi K3, "AttnRes").

prefix <- bf16(prefix + delta). Each source c (the first n blocks and the prefix) scores s = sum(c *
score_weight) * rsqrt(mean(c^2) + eps); the mix is the softmax-weighted sum of the sources themselves, and the
output is its RMSNorm. `write_index` stores the new prefix as a block; callers keep it at or above
`blocks_read`, so that no call reads the block it writes.
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

__all__ = ["SPEC", "oracle", "stock"]

REGIMES = (
    *BASE_REGIMES, "no_blocks", "write_block", "no_delta", "strided_rows", "one_source_dominates",
    "near_overflow", "special_rows",
)  # fmt: skip


def stock(
    *,
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    blocks_read: int,
    write_index: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """bf16 prefix sum, fp32 scores and mix, one rounding at the output."""
    if delta is not None:
        prefix.add_(delta)
    if write_index >= 0:
        blocks[:, write_index].copy_(prefix)
    sources = torch.cat((blocks[:, :blocks_read], prefix.unsqueeze(1)), dim=1).float()
    scale = torch.rsqrt(sources.square().mean(-1) + eps)
    alpha = torch.softmax((sources * score_weight).sum(-1) * scale, dim=-1)
    mix = (alpha.unsqueeze(-1) * sources).sum(1)
    out.copy_(rms_norm(mix, norm_weight, eps))


def oracle(
    *,
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    blocks_read: int,
    write_index: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64 truth; the prefix and the written block are exact bf16 values."""
    total = prefix.double() if delta is None else prefix.double() + delta.double()
    new_prefix = total.to(torch.bfloat16)
    new_blocks = blocks.clone()
    if write_index >= 0:
        new_blocks[:, write_index] = new_prefix

    sources = [blocks[:, i].double() for i in range(blocks_read)] + [new_prefix.double()]
    scores = []
    for source in sources:
        mean_square = (source * source).mean(dim=1)
        scores.append((source @ score_weight.double()) / torch.sqrt(mean_square + eps))
    alpha = torch.softmax(torch.stack(scores, dim=1), dim=1)
    mix = torch.zeros_like(total)
    for i, source in enumerate(sources):
        mix += alpha[:, i : i + 1] * source
    root = torch.sqrt((mix * mix).mean(dim=1, keepdim=True) + eps)
    return {"prefix": new_prefix, "blocks": new_blocks, "out": mix / root * norm_weight.double()}


def touched(
    *, prefix: torch.Tensor, delta: torch.Tensor | None, blocks: torch.Tensor, write_index: int, **_: object
) -> Mapping[str, torch.Tensor]:
    """The whole prefix when there is a delta, and the written block."""
    mask = torch.zeros(blocks.shape, dtype=torch.bool, device=blocks.device)
    if write_index >= 0:
        mask[:, write_index] = True
    full = torch.full(prefix.shape, delta is not None, dtype=torch.bool, device=prefix.device)
    return {"prefix": full, "blocks": mask}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Arguments over the most blocks a layer of the model reads."""
    require_regime("attn_res", REGIMES, regime)
    model = cell.shapes.model
    tokens, hidden, count = cell.tokens, model.hidden, max(1, model.attn_res_blocks)
    blocks = activation(regime, (tokens, count, hidden), generator, device, source="attn_res.blocks")
    prefix = activation(regime, (tokens, hidden), generator, device, source="attn_res.prefix")
    delta = activation(regime, (tokens, hidden), generator, device, source="attn_res.delta")
    if regime == "near_overflow":
        blocks, prefix, delta = (
            (v.float() * NEAR_OVERFLOW_OF_SQUARES).to(v.dtype) for v in (blocks, prefix, delta)
        )
    if regime == "special_rows":
        prefix = with_special_rows(prefix)
    score_scale = 8.0 if regime == "one_source_dominates" else 1.0
    score_weight = weight((hidden,), generator, device, dtype=torch.float32) * score_scale
    norm_weight = weight((hidden,), generator, device, scale=0.2) + 1.0
    if regime == "strided_rows":
        prefix, delta = with_row_gap(prefix), with_row_gap(delta)
    is_writing = regime == "write_block"
    reads = 0 if regime == "no_blocks" else count - 1 if is_writing else count
    return {
        "prefix": prefix,
        "delta": None if regime == "no_delta" else delta,
        "blocks": blocks,
        "blocks_read": reads,
        "write_index": reads if is_writing else -1,
        "score_weight": score_weight,
        "norm_weight": norm_weight,
        "out": poisoned((tokens, hidden), device),
        "eps": model.norm_eps,
    }


SPEC = OpSpec(
    name="attn_res",
    params=(
        Param("prefix", Role.STATE, is_exact=True),
        Param("delta", Role.ACTIVATION),
        Param("blocks", Role.STATE, is_exact=True),
        Param("blocks_read", Role.SCALAR),
        Param("write_index", Role.SCALAR),
        Param("score_weight", Role.WEIGHT),
        Param("norm_weight", Role.WEIGHT),
        Param("out", Role.OUTPUT),
        Param("eps", Role.SCALAR),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
    touched=from_args(touched),
)
