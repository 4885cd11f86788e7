"""Attention residuals on a CPU: blocks and prefix are mixed apart, and no source is copied together.

Scope: any width; up to as many blocks as the buffer has. Layout: as `ops/attn_res.py`; the last axis of every
row is contiguous. Numerics: bf16 prefix sum; scores, shares, mix and norm in fp32, one rounding at the
output. The softmax over blocks is taken first and the prefix joins it with its own share. Validation:
`tests/k3_decode/test_ops.py`.
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
    width = prefix.shape[1]
    own = prefix.float()
    mix = own
    if blocks_read:
        sources = blocks[:, :blocks_read].float()
        squares = torch.linalg.vector_norm(sources, dim=-1).square_().div_(width)
        scores = (sources @ score_weight).mul_(squares.add_(eps).rsqrt_())
        own_square = torch.linalg.vector_norm(own, dim=-1).square_().div_(width)
        own_score = (own @ score_weight).mul_(own_square.add_(eps).rsqrt_()).unsqueeze_(1)
        peak = torch.maximum(scores.amax(1, keepdim=True), own_score)
        shares, own_share = scores.sub_(peak).exp_(), own_score.sub_(peak).exp_()
        mix = torch.bmm(shares.unsqueeze(1), sources).squeeze(1).addcmul_(own, own_share)
        mix.div_(shares.sum(1, keepdim=True).add_(own_share))
    root = torch.linalg.vector_norm(mix, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
    out.copy_((mix * root).mul_(norm_weight))
