"""The optimised step: K3's decode and verify rows through fused ops and nothing else.

The same composition runs on every implementation of `op_table.py`. Buffers are allocated once, for the most
rows a step may have, and every op writes into views of them, so that a step allocates nothing on a GPU and
can be captured. Only the embedding's rows are gathered by torch, and ranks meet through `collectives.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from k3_decode.collectives import Exchange, gather, reduce
from k3_decode.model import SOFTMAX_SCALE
from k3_decode.op_table import Bound, OpTable
from k3_decode.ops.contract import LAUNCH_SLOTS
from k3_decode.ops.mla_query import KV_LORA, QK_ROPE
from k3_decode.rank_weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights
from k3_decode.residuals import Mix, before_attention, before_ffn, before_head
from k3_decode.shapes import K3Shapes
from k3_decode.state import RankCaches, StepInputs

__all__ = ["OptimisedStep", "calls_of_a_step", "is_supported"]


def is_supported(model: K3Shapes) -> bool:
    """Whether the fused ops cover the model's mechanisms: K3's, not Kimi-Linear's."""
    return bool(
        model.attn_res_block
        and model.q_lora
        and model.has_latent_moe
        and model.has_full_rank_gate
        and model.has_mla_gate
        and model.is_situ
    )


def calls_of_a_step(model: K3Shapes) -> dict[str, int]:
    """How often one step calls each op."""
    mla = sum(model.is_mla(layer) for layer in range(model.layers))
    moe = model.layers - 1
    return {
        "attn_res": 2 * model.layers + 1,
        "projection": 2 * model.layers + 1,
        "kda_step": model.layers - mla,
        "moe_front": moe,
        "router": moe,
        "experts": moe,
        "situ_mlp": model.layers,
        "latent_tail": moe,
        "mla_query": mla,
        "mla_attend": mla,
        "mla_value": mla,
    }


@dataclass(frozen=True, slots=True)
class _Layer:
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
    mlp: Bound
    tail: Bound | None


class OptimisedStep:
    """One rank's optimised decode over its weights and caches."""

    def __init__(self, weights: ModelWeights, caches: RankCaches, table: OpTable, max_rows: int) -> None:
        model = weights.shapes.model
        if not is_supported(model):
            raise ValueError(f"the fused ops do not cover {model.name}; only the stock path runs it")
        self._weights, self._caches, self._table, self._model = weights, caches, table, model
        self._layers = tuple(_bind(table, layer, model) for layer in weights.layers)
        self._final_mix: Bound = {"score_weight": weights.final_score, "norm_weight": weights.final_norm}
        self._head = table["projection"].prepare(weight=weights.head)
        device = weights.embedding.device
        self.launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device)
        """Kernel launches by op since the last clearing, counted by the kernels."""
        self.buffers = _allocate(weights, max_rows, device)
        """Every buffer of a step by name, at its most rows."""

    def forward(self, tokens: torch.Tensor, step: StepInputs) -> Exchange:
        """fp32 logits [B, vocab]; they are overwritten by the next step."""
        model, rows, tp = self._model, tokens.shape[0], self._weights.shapes.tp
        block = model.attn_res_block or 0
        use = {name: buffer[:rows] for name, buffer in self.buffers.items()}
        prefix, spare = use["prefix_a"], use["prefix_b"]
        torch.index_select(self._weights.embedding, 0, tokens, out=prefix)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            self._mix(use, before_attention(index, block), prefix, delta, layer.attention_mix)
            self._attend(use, index, layer, step)
            mix = before_ffn(index, block)
            self._run("projection", x=use["core"], out=spare, **layer.out_proj)
            attended = yield from reduce(spare, tp)
            if attended is not spare:
                spare.copy_(attended)
            if mix.restarts:
                prefix, spare = spare, prefix
            self._mix(use, mix, prefix, None if mix.restarts else spare, layer.ffn_mix)
            delta = yield from self._ffn(use, layer)
        self._mix(use, before_head(model.layers, block), prefix, delta, self._final_mix)
        self._run("projection", x=use["x"], out=use["vocab"], **self._head)
        return (yield from gather(use["vocab"], tp))

    def constants(self) -> tuple[object, ...]:
        """Everything held beside the buffers: prepared weights and workspaces."""
        return (self._layers, self._final_mix, self._head)

    def _mix(
        self,
        use: dict[str, torch.Tensor],
        mix: Mix,
        prefix: torch.Tensor,
        delta: torch.Tensor | None,
        constants: Bound,
    ) -> None:
        self._run(
            "attn_res",
            prefix=prefix,
            delta=delta,
            blocks=use["blocks"],
            blocks_read=mix.blocks_read,
            write_index=mix.write_index,
            out=use["x"],
            eps=self._model.norm_eps,
            **constants,
        )

    def _attend(self, use: dict[str, torch.Tensor], index: int, layer: _Layer, step: StepInputs) -> None:
        """Writes `core`, what the output projection takes."""
        if layer.kda is not None:
            memory = self._caches.kda[index]
            self._run("projection", x=use["x"], out=use["kda_packed"], **layer.in_proj)
            self._run(
                "kda_step",
                packed=use["kda_packed"],
                conv_state=memory.conv[:, : step.rows + 2],
                state=memory.recurrent,
                slots=step.slots,
                accepted=step.accepted,
                rows=step.rows,
                lower_bound=self._model.decay_lower_bound,
                out=use["core"],
                eps=self._model.norm_eps,
                **layer.kda,
            )
            return
        assert layer.query is not None
        assert layer.value is not None
        cache, scale = self._caches.mla[index], self._caches.kv_scale
        self._run("projection", x=use["x"], out=use["mla_packed"], **layer.in_proj)
        self._run(
            "mla_query",
            packed=use["mla_packed"],
            cache=cache,
            slot_mapping=step.slot_mapping,
            query=use["query"],
            kv_scale=scale,
            eps=self._model.norm_eps,
            **layer.query,
        )
        self._run(
            "mla_attend",
            query=use["query"],
            cache=cache,
            block_table=step.block_table,
            lengths=step.lengths,
            rows=step.rows,
            scale=SOFTMAX_SCALE,
            kv_scale=scale,
            out=use["mixed"],
            lse=use["lse"],
        )
        self._run(
            "mla_value",
            partial=use["mixed"].unsqueeze(0),
            partial_lse=use["lse"].unsqueeze(0),
            gate=use["mla_packed"][:, -self._weights.shapes.channels :],
            out=use["core"],
            **layer.value,
        )

    def _ffn(self, use: dict[str, torch.Tensor], layer: _Layer) -> Exchange:
        """The FFN's output, combined over ranks."""
        tp = self._weights.shapes.tp
        if layer.front is None or layer.experts is None or layer.tail is None:
            self._run("situ_mlp", x=use["x"], out=use["ffn"], **layer.mlp)
            return (yield from reduce(use["ffn"], tp))
        self._run("moe_front", x=use["x"], logits=use["logits"], latent=use["latent"], **layer.front)
        self._run(
            "router",
            logits=use["logits"],
            bias=layer.bias,
            ids=use["ids"],
            weights=use["shares"],
            scale=self._model.routed_scale,
        )
        self._run(
            "experts",
            latent=use["latent"],
            ids=use["ids"],
            weights=use["shares"],
            out=use["routed"],
            **layer.experts,
        )
        routed = yield from reduce(use["routed"], tp)
        self._run("situ_mlp", x=use["x"], out=use["shared"], **layer.mlp)
        shared = yield from reduce(use["shared"], tp)
        eps = self._model.norm_eps
        self._run("latent_tail", latent=routed, shared=shared, out=use["ffn"], eps=eps, **layer.tail)
        return use["ffn"]

    def _run(self, op: str, **arguments: Any) -> None:
        self._table[op].run(launches=self.launches, **arguments)


def _bind(table: OpTable, layer: LayerWeights, model: K3Shapes) -> _Layer:
    attention, ffn = layer.attention, layer.ffn
    kda = query = value = front = experts = tail = bias = None
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
        mlp = table["situ_mlp"].prepare(gate_up_weight=ffn.shared_gate_up, down_weight=ffn.shared_down)
        front = table["moe_front"].prepare(router_weight=ffn.router_weight, down_weight=ffn.down_weight)
        bias = ffn.router_bias
        experts = table["experts"].prepare(
            w13=ffn.w13, w13_scale=ffn.w13_scale, w2=ffn.w2, w2_scale=ffn.w2_scale
        )
        tail = table["latent_tail"].prepare(norm_weight=ffn.latent_norm, up_weight=ffn.up_weight)
    return _Layer(
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
        tail=tail,
    )


def _bind_mla(table: OpTable, weights: MlaWeights) -> tuple[Bound, Bound]:
    query = table["mla_query"].prepare(
        q_norm=weights.q_norm, q_weight=weights.q_weight, uk_weight=weights.uk_weight
    )
    query["kv_norm"] = weights.kv_norm
    return query, table["mla_value"].prepare(uv_weight=weights.uv_weight)


def _allocate(weights: ModelWeights, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    shapes, model = weights.shapes, weights.shapes.model

    def bf16(*size: int) -> torch.Tensor:
        return torch.zeros((rows, *size), dtype=torch.bfloat16, device=device)

    def fp32(*size: int) -> torch.Tensor:
        return torch.zeros((rows, *size), dtype=torch.float32, device=device)

    return {
        "prefix_a": bf16(model.hidden),
        "prefix_b": bf16(model.hidden),
        "x": bf16(model.hidden),
        "blocks": bf16(model.attn_res_blocks, model.hidden),
        "kda_packed": bf16(shapes.kda_in_rows),
        "mla_packed": bf16(shapes.mla_in_rows),
        "core": bf16(shapes.channels),
        "query": bf16(shapes.heads, KV_LORA + QK_ROPE),
        "mixed": bf16(shapes.heads, KV_LORA),
        "lse": fp32(shapes.heads),
        "logits": fp32(model.experts),
        "latent": bf16(model.latent),
        "ids": torch.zeros((rows, model.top_k), dtype=torch.int32, device=device),
        "shares": fp32(model.top_k),
        "routed": bf16(model.latent),
        "shared": bf16(model.hidden),
        "ffn": bf16(model.hidden),
        "vocab": fp32(weights.head.shape[0]),
    }
