"""Decode attention on a CPU: runs of pages with a running maximum, short requests together.

Scope: any number of requests; contexts up to the cache. Layout: as `ops/mla_attend.py`. Numerics: fp32,
probabilities unrounded; rows of pages past a request's length are replaced by zeros before they meet a
product, so they may hold anything. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["mla_attend"]

PAGE_SIZE = 64
KV_LORA = 512
ROWS_AT_ONCE = 2048
"""Cache rows widened to fp32 together: 4.7 MB, near what a core's caches hold."""


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
    heads = query.shape[1]
    counts = [-(-length // PAGE_SIZE) for length in lengths.tolist()]
    first = 0
    while first < len(counts):
        last, widest = first + 1, counts[first]
        while (
            last < len(counts) and max(widest, counts[last]) * (last + 1 - first) * PAGE_SIZE <= ROWS_AT_ONCE
        ):
            widest = max(widest, counts[last])
            last += 1
        mine = slice(first * rows, last * rows)
        mix, sums = _attend(
            query[mine].reshape(last - first, rows * heads, -1).float(),
            cache,
            block_table[first:last, :widest].long(),
            lengths[first:last].long(),
            rows,
            scale * kv_scale,
        )
        out[mine] = mix.mul_(kv_scale).view(-1, heads, KV_LORA)
        lse[mine] = sums.view(-1, heads)
        first = last


def _attend(
    queries: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes [R, rows x H, 512] in the cache's units, and lse, of a few requests, run of pages after run."""
    requests, count = pages.shape
    run = max(1, ROWS_AT_ONCE // (requests * PAGE_SIZE))
    heads = queries.shape[1] // rows
    newest = (lengths[:, None] - rows + torch.arange(rows)).repeat_interleave(heads, dim=1).unsqueeze(-1)
    peak = torch.full(queries.shape[:2], -torch.inf)
    total = torch.zeros(queries.shape[:2])
    mix = torch.zeros(*queries.shape[:2], KV_LORA)
    for start in range(0, count, run):
        keys = cache[pages[:, start : start + run]].view(requests, -1, cache.shape[2]).float()
        begin = start * PAGE_SIZE
        for i, length in enumerate(lengths.tolist()):
            keys[i, max(0, length - begin) :] = 0.0
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        position = torch.arange(begin, begin + keys.shape[1])
        scores.masked_fill_(position > newest, -torch.inf)
        highest = torch.maximum(peak, scores.amax(-1))
        base = highest.masked_fill(highest == -torch.inf, 0.0)
        shares = scores.sub_(base.unsqueeze(-1)).exp_()
        kept = torch.exp(peak - base)
        total.mul_(kept).add_(shares.sum(-1))
        mix = torch.baddbmm(mix.mul_(kept.unsqueeze(-1)), shares, keys[..., :KV_LORA])
        peak = highest
    has_keys = total > 0
    mix.div_(torch.where(has_keys, total, 1.0).unsqueeze(-1))
    return mix, torch.where(has_keys, peak + total.log(), -torch.inf)
