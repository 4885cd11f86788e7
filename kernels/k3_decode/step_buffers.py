"""Every buffer of a step, allocated once for the most rows it may have.

What ranks exchange (`logits`, `latent`, `ffn`) has several slots, over which layers rotate: a rank may still
read one layer's exchange while a faster peer writes the next one's.
"""

import torch

from k3_decode.bound_layers import ChainOptions
from k3_decode.op_table import OpTable
from k3_decode.ops.mla_query import KV_LORA, QK_ROPE
from k3_decode.shapes import RankShapes

__all__ = ["Buffers", "allocate", "views_of"]

Buffers = dict[str, torch.Tensor]
"""Views of one step's buffers by name; exchanged ones keep two axes in front, slots and copies."""
EXCHANGED = ("logits", "latent", "ffn")
SPLIT = ("mixed", "lse")
"""Buffers that hold every split's rows one after another."""
MAX_ROWS_PER_REQUEST = 8
"""Of a verify step: one row of the request's own and seven drafts."""


def allocate(shapes: RankShapes, table: OpTable, options: ChainOptions, device: torch.device) -> Buffers:
    """Zeroed buffers at their most rows."""
    model, rows = shapes.model, options.max_rows
    places = (options.exchange_slots, options.copies)

    def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    heads = shapes.heads * options.context_ranks
    pairs = _most_pairs(heads, table, rows)
    return {
        "prefix_a": zeros(rows, model.hidden),
        "prefix_b": zeros(rows, model.hidden),
        "x": zeros(rows, model.hidden),
        "blocks": zeros(rows, model.attn_res_blocks, model.hidden),
        "kda_packed": zeros(rows, shapes.kda_in_rows),
        "mla_packed": zeros(rows, shapes.mla_in_rows),
        "core": zeros(rows, shapes.channels),
        "query": zeros(rows, heads, KV_LORA + QK_ROPE),
        "mixed": zeros(pairs, KV_LORA),
        "lse": zeros(pairs, dtype=torch.float32),
        "logits": zeros(*places, rows, model.experts, dtype=torch.float32),
        "latent": zeros(*places, rows, model.latent),
        "hidden": zeros(rows, shapes.shared_inter),
        "ids": zeros(rows, model.top_k, dtype=torch.int32),
        "shares": zeros(rows, model.top_k, dtype=torch.float32),
        "routed": zeros(rows, model.latent),
        "shared": zeros(rows, model.hidden),
        "ffn": zeros(*places, rows, model.hidden),
    }


def _most_pairs(heads: int, table: OpTable, max_rows: int) -> int:
    """(split, row, head) triples that the widest step of `max_rows` rows or fewer has."""
    splits_of = table["mla_attend"].splits_of
    return max(
        splits_of(requests, rows, heads) * requests * rows * heads
        for rows in range(1, MAX_ROWS_PER_REQUEST + 1)
        for requests in range(1, max_rows // rows + 1)
    )


def views_of(buffers: Buffers, rows: int) -> Buffers:
    """The buffers of a step of `rows` rows."""
    return {name: _view(name, buffer, rows) for name, buffer in buffers.items()}


def _view(name: str, buffer: torch.Tensor, rows: int) -> torch.Tensor:
    if name in SPLIT:
        return buffer
    return buffer[:, :, :rows] if name in EXCHANGED else buffer[:rows]
