"""Attention residuals on a CPU: scores and mix are matrix products over all sources at once.

Scope: any width; up to as many blocks as the buffer has. Layout: as `ops/attn_res.py`; the last axis of
every row is contiguous. Numerics: bf16 prefix sum; scores, shares, mix and norm in fp32, one rounding at
the output. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["attn_res"]


def attn_res(
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
    launches: torch.Tensor,
) -> None:
    """See `ops/attn_res.py`."""
    count_launch(launches, "attn_res")
    if delta is not None:
        torch.add(prefix, delta, out=prefix)
    if write_index >= 0:
        blocks[:, write_index] = prefix
    sources = torch.cat((blocks[:, :blocks_read], prefix.unsqueeze(1)), dim=1).float()
    scores = (sources @ score_weight).mul_(_inverse_root(sources, eps))
    mix = torch.bmm(torch.softmax(scores, dim=1).unsqueeze(1), sources).squeeze(1)
    out.copy_(mix.mul_(_inverse_root(mix, eps).unsqueeze(1)).mul_(norm_weight))


def _inverse_root(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean square + eps) over the last axis."""
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norm.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()
