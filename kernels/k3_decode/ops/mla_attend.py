"""Decode attention of latent queries over the paged cache, causal among a request's own rows.

Row t of a request of length n reads its first n - rows + 1 + t tokens. score = scale * (query . row),
softmax, out = sum of p * row[:512]; `lse` is the natural logarithm of the sum of exp(score). A row without
keys has zeros and lse -inf. Cache values count times `kv_scale`. Entries of pages past a request's length
hold anything, NaN included, and entries of the block table past its pages are never followed.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import (
    BASE_REGIMES,
    POOL_ELEMENTS,
    activation,
    poisoned,
    require_regime,
    spread,
)
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mla_query import FP8_KV_SCALE, KV_LORA, PAGE_SIZE, QK_NOPE, QK_ROPE, cache_dtype, to_cache

__all__ = ["LSE_BASE", "SPEC", "oracle", "stock"]

REGIMES = (*BASE_REGIMES, "uneven_lengths", "empty_request", "poisoned_tail", "sharp", "strided_query")
ROW = KV_LORA + QK_ROPE
LSE_BASE = LogBase.E
"""Of the op's `lse`."""
NOISE_ELEMENTS = (1 << 20) + 7
"""Prime."""
LARGEST_POOL_BYTES = 12 << 30
"""Above it requests share pages, which they only read."""


def stock(
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
) -> None:
    """fp32 scores and sums; probabilities rounded to bf16 before they meet the values, as on tensor cores.

    On a GPU scores come from tensor cores too, as in FlashMLA: over heavy tails its lse was 6e-7 from float64
    (median of 24 draws), where products by fp32 units are 1e-7 to 2e-7 away.
    """
    for request, length in enumerate(lengths.tolist()):
        mine = slice(request * rows, (request + 1) * rows)
        if length <= 0:
            out[mine] = 0
            lse[mine] = -torch.inf
            continue
        pages = block_table[request, : -(-length // PAGE_SIZE)].long()
        rows_of_keys = cache[pages].flatten(0, 1)[:length]
        keys = rows_of_keys.float()
        scores = _scores(query[mine].flatten(0, 1), rows_of_keys) * (scale * kv_scale)
        newest = torch.arange(rows, device=query.device).repeat_interleave(query.shape[1]) + length - rows
        hidden = torch.arange(length, device=query.device) > newest[:, None]
        scores.masked_fill_(hidden, -torch.inf)
        peak = scores.amax(-1)
        p = torch.exp(scores - peak.masked_fill(peak == -torch.inf, 0.0)[:, None])
        total = p.sum(-1)
        values = p.to(torch.bfloat16).float() @ keys[:, :KV_LORA]
        mix = (values * (kv_scale / total)[:, None]).masked_fill((total == 0)[:, None], 0.0)
        out[mine] = mix.view(out[mine].shape).to(torch.bfloat16)
        lse[mine] = (peak + total.log()).view(lse[mine].shape)


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """bf16 products with fp32 sums: by tensor cores where there are any."""
    if not queries.is_cuda:
        return queries.float() @ keys.float().T
    # Whole pages, as cuBLAS leaves the tensor cores where a row of results is no multiple of 16 bytes.
    padded = functional.pad(keys.to(torch.bfloat16), (0, 0, 0, -len(keys) % PAGE_SIZE))
    return torch.mm(queries, padded.T, out_dtype=torch.float32)[:, : len(keys)]


def oracle(
    *,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    scale: float,
    kv_scale: float,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64, one request and one row at a time."""
    tokens, heads, _row = query.shape
    out = torch.zeros(tokens, heads, KV_LORA, dtype=torch.float64, device=query.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=query.device)
    for request, length in enumerate(lengths.tolist()):
        count = -(-length // PAGE_SIZE)
        kept = [cache[page] for page in block_table[request, :count].tolist()]
        if not kept:
            continue
        keys = torch.cat(kept)[:length].double() * kv_scale
        for t in range(rows):
            visible = keys[: max(0, length - rows + 1 + t)]
            if not len(visible):
                continue
            token = request * rows + t
            scores = scale * (query[token].double() @ visible.T)
            lse[token] = torch.logsumexp(scores, dim=1)
            out[token] = torch.softmax(scores, dim=1) @ visible[:, :KV_LORA]
    return {"out": out, "lse": lse}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Requests of about `context` tokens over permuted pages; page 0 belongs to nobody and holds NaN."""
    require_regime("mla_attend", REGIMES, regime)
    heads, rows, requests = cell.shapes.heads, cell.rows, cell.requests
    is_fp8 = cell.kv_dtype == "fp8"
    lengths = _lengths(cell, regime, generator)
    per_request = -(-int(lengths.max()) // PAGE_SIZE)
    largest = LARGEST_POOL_BYTES // (PAGE_SIZE * ROW * 2) - 1
    pages = max(per_request, min(requests * per_request, largest)) + 1
    order = torch.randperm(pages - 1, generator=generator) + 1
    table = torch.zeros(requests, per_request + 1, dtype=torch.int32)
    for request, length in enumerate(lengths.tolist()):
        count = -(-length // PAGE_SIZE)
        places = (torch.arange(count) + request * per_request) % (pages - 1)
        table[request, :count] = order[places].to(torch.int32)
    kv_scale = FP8_KV_SCALE if is_fp8 else 1.0
    cache = _cache(cell, regime, pages, kv_scale, generator, device)
    if regime == "poisoned_tail":
        _poison_tails(cache, table, lengths)
    query = activation(
        regime, (cell.tokens, heads, ROW), generator, device, large=30.0, source="mla_attend.query"
    )
    if regime == "sharp":
        query = query * 8
    if regime == "strided_query":
        query = _with_head_gap(query)
    return {
        "query": query,
        "cache": cache,
        "block_table": table.to(device),
        "lengths": lengths.to(device),
        "rows": rows,
        "scale": (QK_NOPE + QK_ROPE) ** -0.5,
        "kv_scale": kv_scale,
        "out": poisoned((cell.tokens, heads, KV_LORA), device),
        "lse": poisoned((cell.tokens, heads), device, torch.float32),
    }


def _lengths(cell: Cell, regime: str, generator: torch.Generator) -> torch.Tensor:
    """int32 [R]: `context`, or anything from `rows` to it; the longest has `context`."""
    context = max(cell.context, cell.rows)
    lengths = torch.full((cell.requests,), context, dtype=torch.int32)
    if regime in ("uneven_lengths", "poisoned_tail"):
        lengths = torch.randint(
            cell.rows, context + 1, (cell.requests,), generator=generator, dtype=torch.int32
        )
        lengths[0] = context
    if regime == "empty_request":
        lengths[-1] = 0
    return lengths


def _cache(
    cell: Cell, regime: str, pages: int, kv_scale: float, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    count = pages * PAGE_SIZE * ROW
    kind = "gaussian" if cell.kv_dtype == "fp8" and regime in ("large", "tiny") else regime
    if kind in ("constant_rows", "recorded"):
        rows = (min(pages * PAGE_SIZE, POOL_ELEMENTS // ROW), ROW)
        pool = activation(kind, rows, generator, device, source="mla_attend.cache").flatten()
        if kind == "recorded":  # no two keys of a context are equal: sums of equal terms round to one side
            pool = (pool.float() * (1 + 0.1 * _noise(pool.numel(), generator, device))).to(pool.dtype)
    else:
        pool = activation(kind, (min(count, POOL_ELEMENTS),), generator, device, large=30.0)
    stored = to_cache(pool, kv_scale, cache_dtype(cell.kv_dtype))
    cache = spread(stored, (pages, PAGE_SIZE, ROW), device).clone()
    cache[0] = torch.nan
    return cache


def _noise(count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """fp32 [count] of unit normals that repeat after a prime number of them."""
    drawn = torch.randn(min(count, NOISE_ELEMENTS), generator=generator)
    return spread(drawn, (count,), device)


def _poison_tails(cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
    """NaN in every entry of a request's last page past its length."""
    for request, length in enumerate(lengths.tolist()):
        if length % PAGE_SIZE:
            cache[int(table[request, length // PAGE_SIZE]), length % PAGE_SIZE :] = torch.nan


def _with_head_gap(query: torch.Tensor) -> torch.Tensor:
    """The same queries at a token stride of one head more."""
    tokens, heads, width = query.shape
    wide = poisoned((tokens, heads + 1, width), query.device, query.dtype)
    wide[:, :heads] = query
    return wide[:, :heads]


SPEC = OpSpec(
    name="mla_attend",
    params=(
        Param("query", Role.ACTIVATION),
        Param("cache", Role.ACTIVATION),
        Param("block_table", Role.INDEX),
        Param("lengths", Role.INDEX),
        Param("rows", Role.SCALAR),
        Param("scale", Role.SCALAR),
        Param("kv_scale", Role.SCALAR),
        Param("out", Role.OUTPUT),
        Param("lse", Role.OUTPUT),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
)
