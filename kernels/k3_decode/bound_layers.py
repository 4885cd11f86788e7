"""A layer's weights as the arguments that its ops take, laid out once at load time.

With the layout `sharded` a rank keeps its rows of the router and of both latent projections and drops the
others.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from k3_decode.op_table import Bound, OpTable
from k3_decode.overlap import Schedule, overlap_of, places_of
from k3_decode.rank_weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights
from k3_decode.shapes import RankShapes

__all__ = [
    "BoundLayer",
    "ChainOptions",
    "Layout",
    "bind_layer",
    "share_of",
]

Layout = Literal["whole", "sharded"]


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How a chain runs."""

    max_rows: int
    rank: int = 0
    first_layer: int = 0
    """Place of the chain's first layer in the model, which decides what AttnRes reads and writes."""
    layout: Layout = "whole"
    exchange_slots: int = 1
    """Buffers that an exchange rotates over, layer by layer."""
    copies: int = 1
    """Places that a rank's part of an exchange is stored to; where one rank runs alone, a place for each."""
    context_ranks: int = 1
    """Ranks over which MLA's caches are divided (`context_share.py`): 1, or all tensor-parallel ones."""
    schedule: Schedule = overlap_of
    """How the shared expert, the routed ones and prefetches share a GPU; on a CPU all of it runs in turn."""


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer's constant arguments by op."""

    attention_mix: Bound
    ffn_mix: Bound
    in_proj: Bound
    out_proj: Bound
    kda: Bound | None
    query: Bound | None
    value: Bound | None
    front: Bound | None
    bias: torch.Tensor | None
    experts: Bound | None
    mlp: Bound | None
    """Of the dense layer, and of a shared expert that runs aside."""
    narrow: Bound | None
    """Of a shared expert that a few multiprocessors take."""
    shared_down: Bound | None
    tail: Bound | None


def bind_layer(table: OpTable, layer: LayerWeights, shapes: RankShapes, options: ChainOptions) -> BoundLayer:
    """The layer on a table of ops."""
    attention, ffn = layer.attention, layer.ffn
    device_type = layer.attention_norm.device.type
    kda = query = value = front = experts = tail = bias = mlp = narrow = shared_down = None
    if isinstance(attention, KdaWeights):
        kda = table["kda_step"].prepare(
            conv_weight=attention.conv_weight,
            decay_weight=attention.decay_weight,
            a_log=attention.a_log,
            dt_bias=attention.dt_bias,
            norm_weight=attention.norm_weight,
        )
    else:
        query, value = _bind_mla(table, attention)
    if isinstance(ffn, DenseWeights):
        mlp = table["situ_mlp"].prepare(gate_up_weight=ffn.gate_up, down_weight=ffn.down)
    else:

        def own(weight: torch.Tensor | None) -> torch.Tensor | None:
            if weight is None or options.layout == "whole":
                return weight
            return weight[share_of(weight.shape[0], shapes.tp, options.rank)]

        shared_down = table["projection"].prepare(weight=ffn.shared_down)
        shared = {"gate_up_weight": ffn.shared_gate_up, "down_weight": ffn.shared_down}
        if device_type != "cpu":
            has_narrow = "narrow_mlp" in table
            inter, most = shapes.shared_inter, options.max_rows
            places = places_of(options.schedule, inter, most, has_narrow=has_narrow)
            if "aside" in places:
                mlp = table["situ_mlp"].prepare(**shared)
            if has_narrow:
                narrow = table["narrow_mlp"].prepare(**shared)
        front = table["moe_front"].prepare(
            router_weight=own(ffn.router_weight),
            down_weight=own(ffn.down_weight),
            gate_up_weight=ffn.shared_gate_up,
        )
        bias = ffn.router_bias
        experts = table["experts"].prepare(
            w13=ffn.w13, w13_scale=ffn.w13_scale, w2=ffn.w2, w2_scale=ffn.w2_scale
        )
        tail = table["latent_tail"].prepare(norm_weight=ffn.latent_norm, up_weight=own(ffn.up_weight))
    return BoundLayer(
        attention_mix={"score_weight": layer.attention_score, "norm_weight": layer.attention_norm},
        ffn_mix={"score_weight": layer.ffn_score, "norm_weight": layer.ffn_norm},
        in_proj=table["projection"].prepare(weight=attention.in_proj),
        out_proj=table["projection"].prepare(weight=attention.out_proj),
        kda=kda,
        query=query,
        value=value,
        front=front,
        bias=bias,
        experts=experts,
        mlp=mlp,
        narrow=narrow,
        shared_down=shared_down,
        tail=tail,
    )


def _bind_mla(table: OpTable, weights: MlaWeights) -> tuple[Bound, Bound]:
    query = table["mla_query"].prepare(
        q_norm=weights.q_norm, q_weight=weights.q_weight, uk_weight=weights.uk_weight
    )
    query["kv_norm"] = weights.kv_norm
    return query, table["mla_value"].prepare(uv_weight=weights.uv_weight)


def share_of(width: int, tp: int, rank: int) -> slice:
    """A rank's part of `width` columns or rows; raises `ValueError` where ranks do not divide them."""
    if width % tp:
        raise ValueError(f"{width} columns cannot be divided over {tp} ranks; use the layout `whole`")
    return slice(rank * (width // tp), (rank + 1) * (width // tp))
