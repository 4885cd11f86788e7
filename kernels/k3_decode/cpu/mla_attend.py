"""Decode attention on a CPU: pages are widened into one small buffer, run after run, with a running maximum.

Scope: any number of requests; contexts up to the cache. Layout: as `ops/mla_attend.py`. Numerics: fp32,
probabilities unrounded; entries of a page past the request's length are never read. Validation:
`tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch
from k3_decode.tuned import choice

__all__ = ["mla_attend"]

PAGE_SIZE = 64
KV_LORA = 512
PAGES_AT_ONCE = 16
"""Widened together where no other number was measured: 2.4 MB, near what a core's caches hold."""


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
    heads, width = query.shape[1:]
    buffer = torch.empty(_pages_at_once(rows * heads), PAGE_SIZE, width)
    wide = query.float()
    for request, length in enumerate(lengths.tolist()):
        mine = slice(request * rows, (request + 1) * rows)
        pages = block_table[request, : -(-length // PAGE_SIZE)].tolist()
        mix, sums = _attend(wide[mine].flatten(0, 1), cache, pages, length, rows, scale * kv_scale, buffer)
        out[mine] = mix.mul_(kv_scale).view(rows, heads, KV_LORA)
        lse[mine] = sums.view(rows, heads)


def _attend(
    queries: torch.Tensor,
    cache: torch.Tensor,
    pages: list[int],
    length: int,
    rows: int,
    scale: float,
    buffer: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix [rows x H, 512], in the cache's units, and lse of one request."""
    count = queries.shape[0]
    newest = torch.arange(length - rows, length).repeat_interleave(count // rows).unsqueeze(1)
    peak, total = torch.full((count, 1), -torch.inf), torch.zeros(count, 1)
    mix = torch.zeros(count, KV_LORA)
    for start in range(0, len(pages), len(buffer)):
        run = pages[start : start + len(buffer)]
        for target, page in zip(buffer, run, strict=False):
            target.copy_(cache[page])
        begin = start * PAGE_SIZE
        keys = buffer.view(-1, buffer.shape[2])[: min(len(run) * PAGE_SIZE, length - begin)]
        scores = torch.mm(queries, keys.T).mul_(scale)
        if begin + len(keys) > length - rows + 1:
            scores.masked_fill_(torch.arange(begin, begin + len(keys)) > newest, -torch.inf)
        highest = torch.maximum(peak, scores.amax(1, keepdim=True))
        base = highest.masked_fill(highest == -torch.inf, 0.0)
        shares = scores.sub_(base).exp_()
        kept = torch.exp(peak - base)
        total.mul_(kept).add_(shares.sum(1, keepdim=True))
        mix = torch.addmm(mix.mul_(kept), shares, keys[:, :KV_LORA])
        peak = highest
    has_keys = total > 0
    mix.div_(torch.where(has_keys, total, 1.0))
    return mix, torch.where(has_keys, peak + total.log(), -torch.inf)


def _pages_at_once(queries: int) -> int:
    found = choice("cpu", "mla_attend", {"queries": queries})
    return PAGES_AT_ONCE if found is None else found.values["pages_at_once"]
