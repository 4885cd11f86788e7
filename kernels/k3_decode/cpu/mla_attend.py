"""Decode attention on a CPU: runs of pages with a running maximum, several requests at once.

Scope: any number of requests; contexts up to the cache. Layout: as `ops/mla_attend.py`. Numerics: fp32,
probabilities unrounded; rows of pages past a request's length are replaced by zeros before they meet a
product, so they may hold anything. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["mla_attend"]

PAGE_SIZE = 64
KV_LORA = 512
MOST_GATHERED_ROWS = 1 << 15
"""Cache rows widened to fp32 at once: 75 MB."""


def mla_attend(
    *,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    scale: float,
    kv_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    launches: torch.Tensor,
) -> None:
    """See `ops/mla_attend.py`."""
    count_launch(launches, "mla_attend")
    requests, heads = block_table.shape[0], query.shape[1]
    queries = query.reshape(requests, rows * heads, -1).float()
    count = -(-int(lengths.max()) // PAGE_SIZE)
    run = max(1, MOST_GATHERED_ROWS // (requests * PAGE_SIZE))
    last = (lengths.long()[:, None] - rows + torch.arange(rows)).repeat_interleave(heads, dim=1)
    peak = torch.full(queries.shape[:2], -torch.inf)
    total = torch.zeros(queries.shape[:2])
    mix = torch.zeros(*queries.shape[:2], KV_LORA)
    for start in range(0, count, run):
        pages = block_table[:, start : min(start + run, count)].long()
        position = torch.arange(pages.shape[1] * PAGE_SIZE) + start * PAGE_SIZE
        keys = cache[pages].view(requests, -1, cache.shape[2]).float()
        keys.masked_fill_((position >= lengths[:, None]).unsqueeze(-1), 0.0)
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale * kv_scale)
        scores.masked_fill_(position > last.unsqueeze(-1), -torch.inf)
        highest = torch.maximum(peak, scores.amax(-1))
        base = highest.masked_fill(highest == -torch.inf, 0.0)
        shares = scores.sub_(base.unsqueeze(-1)).exp_()
        kept = torch.exp(peak - base)
        total.mul_(kept).add_(shares.sum(-1))
        mix = torch.baddbmm(mix.mul_(kept.unsqueeze(-1)), shares, keys[..., :KV_LORA])
        peak = highest
    has_keys = total > 0
    mix.mul_((kv_scale / torch.where(has_keys, total, 1.0)).unsqueeze(-1))
    out.copy_(mix.view(out.shape))
    lse.copy_(torch.where(has_keys, peak + total.log(), -torch.inf).view(lse.shape))
