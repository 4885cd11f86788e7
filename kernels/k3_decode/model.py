"""The stock path: K3 and Kimi-Linear from configuration alone, for prefill, decode and verify.

Composed of the ops' stock functions for decode rows, and of plain torch over whole chunks of one request for
prefill. Where ranks must combine their parts a forward yields a `Collective` (`collectives/`).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from k3_decode.collectives import Exchange, gather, reduce
from k3_decode.kda_prefill import KdaInputs, advance, convolve
from k3_decode.ops import attn_res, experts, kda_step, latent_tail, mla_attend, mla_query, mla_value, router
from k3_decode.ops.mla_query import KV_LORA, QK_NOPE, QK_ROPE
from k3_decode.ops.mxfp4 import dequantise
from k3_decode.ops.norms import rms_norm
from k3_decode.ops.products import batched, linear
from k3_decode.ops.situ_mlp import situ
from k3_decode.rank_weights import DenseWeights, KdaWeights, MlaWeights, ModelWeights, MoeWeights
from k3_decode.residuals import Mix, before_attention, before_ffn, before_head
from k3_decode.state import RankCaches, StepInputs

__all__ = ["SOFTMAX_SCALE", "PrefillChunk", "StockModel"]

SOFTMAX_SCALE = (QK_NOPE + QK_ROPE) ** -0.5
QUERY_BLOCK = 512
"""Prefill queries that attend at once; bounds the scores to 512 x context a head."""
UNPACKED_EXPERT_BYTES = 256 << 20
"""Experts that fit are dequantised once, when the model is built."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Some consecutive prompt tokens of one request."""

    home: int
    """Slot of its state."""
    start: int
    """Tokens of the request before the chunk."""
    slot_mapping: torch.Tensor
    """int64 [T]: where the chunk's KV rows go."""
    pages: torch.Tensor
    """int64: the request's pages up to the chunk's end."""
    wants_all_rows: bool = False
    """Whether every token's logits are wanted, rather than the last one's."""


class StockModel:
    """One rank's stock forward over its weights and caches."""

    def __init__(self, weights: ModelWeights, caches: RankCaches) -> None:
        self._weights, self._caches = weights, caches
        self._model, self._tp = weights.shapes.model, weights.shapes.tp
        self._unpacked = _unpacked_experts(weights)
        self.choice: torch.Tensor | None = None
        """int32 [B, k]: experts of the last MoE layer that ran."""

    def forward(self, tokens: torch.Tensor, work: StepInputs | PrefillChunk) -> Exchange:
        """fp32 logits [B, vocab] of step rows, or [1, vocab] after a chunk ([T, vocab] if it wants all)."""
        weights, block = self._weights, self._model.attn_res_block
        stream = _Stream(weights.embedding[tokens], self._model.attn_res_blocks, self._model.norm_eps)
        for index, layer in enumerate(weights.layers):
            mix = before_attention(index, block) if block else None
            x = stream.read(mix, layer.attention_score, layer.attention_norm)
            mixed = self._attention(index, layer.attention, x, work)
            stream.delta = yield from reduce(linear(mixed, layer.attention.out_proj), self._tp)
            mix = before_ffn(index, block) if block else None
            x = stream.read(mix, layer.ffn_score, layer.ffn_norm)
            stream.delta = yield from self._ffn(index, layer.ffn, x)
        if isinstance(work, PrefillChunk) and not work.wants_all_rows:
            stream.keep_last_row()
        mix = before_head(self._model.layers, block) if block else None
        x = stream.read(mix, weights.final_score, weights.final_norm)
        logits = functional.linear(x.float(), weights.head.float())
        return (yield from gather(logits, self._tp))

    def constants(self) -> object:
        """What it holds beside weights and caches: experts unpacked to bf16, if any."""
        return self._unpacked

    def _attention(
        self, index: int, weights: KdaWeights | MlaWeights, x: torch.Tensor, work: StepInputs | PrefillChunk
    ) -> torch.Tensor:
        """bf16 [B, P], before the output projection."""
        if isinstance(weights, KdaWeights):
            packed = self._kda_packed(weights, x)
            if isinstance(work, StepInputs):
                return self._kda_rows(index, weights, packed, work)
            return self._kda_chunk(index, weights, packed, work)
        packed = linear(x, weights.in_proj)
        q = self._mla_query(weights, packed)
        first = packed.shape[1] - self._gate_width() - KV_LORA - QK_ROPE
        mla_query.store_rows(
            packed[:, first : first + KV_LORA + QK_ROPE],
            weights.kv_norm,
            self._caches.mla[index],
            work.slot_mapping,
            self._caches.kv_scale,
            self._model.norm_eps,
        )
        gate = packed[:, packed.shape[1] - self._gate_width() :] if self._gate_width() else None
        if isinstance(work, StepInputs):
            return self._mla_rows(index, weights, q, gate, work)
        return self._mla_chunk(index, weights, q, gate, work)

    def _kda_packed(self, weights: KdaWeights, x: torch.Tensor) -> torch.Tensor:
        """The packed rows that `kda_step` takes; a low-rank gate is expanded into g's place."""
        packed = linear(x, weights.in_proj)
        if weights.gate_b is None:
            return packed
        width, rank = 3 * self._weights.shapes.channels, weights.gate_b.shape[1]
        gate = linear(packed[:, width : width + rank], weights.gate_b)
        return torch.cat((packed[:, :width], gate, packed[:, width + rank :]), dim=1)

    def _kda_rows(
        self, index: int, weights: KdaWeights, packed: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        memory = self._caches.kda[index]
        out = packed.new_empty(packed.shape[0], self._weights.shapes.channels)
        kda_step.stock(
            packed=packed,
            conv_weight=weights.conv_weight,
            decay_weight=weights.decay_weight,
            a_log=weights.a_log,
            dt_bias=weights.dt_bias,
            norm_weight=weights.norm_weight,
            conv_state=memory.conv[:, : step.rows + 2],
            state=memory.recurrent,
            slots=step.slots,
            accepted=step.accepted,
            rows=step.rows,
            lower_bound=self._model.decay_lower_bound,
            out=out,
            eps=self._model.norm_eps,
        )
        return out

    def _kda_chunk(
        self, index: int, weights: KdaWeights, packed: torch.Tensor, chunk: PrefillChunk
    ) -> torch.Tensor:
        width, heads = self._weights.shapes.channels, self._weights.shapes.heads
        memory, rank = self._caches.kda[index], weights.decay_weight.shape[1]
        rows, history = packed[:, : 3 * width], memory.conv[chunk.home, :3].clone()
        inputs = KdaInputs(
            convolve(history, rows, weights.conv_weight),
            linear(packed[:, 4 * width : 4 * width + rank], weights.decay_weight),
            packed[:, 4 * width + rank : 4 * width + rank + heads],
            weights.a_log,
            weights.dt_bias,
            self._model.decay_lower_bound,
        )
        read, state = advance(inputs, memory.recurrent[chunk.home])
        memory.recurrent[chunk.home] = state
        memory.conv[chunk.home, :3] = torch.cat((history, rows))[-3:]
        scale = torch.rsqrt(read.square().mean(-1, keepdim=True) + self._model.norm_eps)
        normed = (read * scale * weights.norm_weight).flatten(1)
        return (normed * torch.sigmoid(packed[:, 3 * width : 4 * width].float())).to(torch.bfloat16)

    def _gate_width(self) -> int:
        return self._weights.shapes.channels if self._model.has_mla_gate else 0

    def _mla_query(self, weights: MlaWeights, packed: torch.Tensor) -> torch.Tensor:
        """bf16 per-head queries [B, H, 192]."""
        heads = self._weights.shapes.heads
        if weights.q_weight is None or weights.q_norm is None:
            return packed[:, : heads * (QK_NOPE + QK_ROPE)].reshape(-1, heads, QK_NOPE + QK_ROPE)
        normed = rms_norm(packed[:, : weights.q_norm.shape[0]], weights.q_norm, self._model.norm_eps)
        return linear(normed, weights.q_weight).view(-1, heads, QK_NOPE + QK_ROPE)

    def _mla_rows(
        self, index: int, weights: MlaWeights, q: torch.Tensor, gate: torch.Tensor | None, step: StepInputs
    ) -> torch.Tensor:
        query = q.new_empty(*q.shape[:2], KV_LORA + QK_ROPE)
        mla_query.absorb(q, weights.uk_weight, query)
        latent = q.new_empty(*q.shape[:2], KV_LORA)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        mla_attend.stock(
            query=query,
            cache=self._caches.mla[index],
            block_table=step.block_table,
            lengths=step.lengths,
            rows=step.rows,
            scale=SOFTMAX_SCALE,
            kv_scale=self._caches.kv_scale,
            out=latent,
            lse=lse,
        )
        if gate is None:
            return batched(latent.transpose(0, 1), weights.uv_weight).transpose(0, 1).flatten(1)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        mla_value.stock(
            partial=latent.unsqueeze(0),
            partial_lse=lse.unsqueeze(0),
            uv_weight=weights.uv_weight,
            gate=gate,
            lse_base=mla_attend.LSE_BASE,
            out=out,
        )
        return out

    def _mla_chunk(
        self, index: int, weights: MlaWeights, q: torch.Tensor, gate: torch.Tensor | None, chunk: PrefillChunk
    ) -> torch.Tensor:
        """Per-head keys and values of the whole cache so far; causal attention in blocks of queries."""
        tokens, heads, _width = q.shape
        total = chunk.start + tokens
        cached = self._caches.mla[index][chunk.pages].flatten(0, 1)[:total].float() * self._caches.kv_scale
        cached = cached.to(torch.bfloat16)
        latent, rope = cached[:, :KV_LORA], cached[:, KV_LORA:]
        keys = batched(latent, weights.uk_weight.transpose(1, 2)).float()
        keys = torch.cat((keys, rope.float().expand(heads, -1, -1)), dim=2)
        values = batched(latent, weights.uv_weight).float()
        out = q.new_empty(tokens, heads, self._model.v_dim)
        for first in range(0, tokens, QUERY_BLOCK):
            part = q[first : first + QUERY_BLOCK].transpose(0, 1).float()
            seen = min(chunk.start + first + part.shape[1], total)
            scores = torch.matmul(part, keys[:, :seen].transpose(1, 2)) * SOFTMAX_SCALE
            own = torch.arange(part.shape[1], device=q.device) + chunk.start + first
            hidden = torch.arange(seen, device=q.device) > own.unsqueeze(1)
            p = torch.softmax(scores.masked_fill_(hidden, -torch.inf), dim=-1)
            out[first : first + part.shape[1]] = torch.matmul(p, values[:, :seen]).transpose(0, 1)
        if gate is None:
            return out.flatten(1)
        return (out.flatten(1).float() * torch.sigmoid(gate.float())).to(torch.bfloat16)

    def _ffn(self, index: int, weights: MoeWeights | DenseWeights, x: torch.Tensor) -> Exchange:
        """bf16 [B, D], combined over ranks."""
        if isinstance(weights, DenseWeights):
            return (yield from reduce(self._mlp(x, weights.gate_up, weights.down), self._tp))
        model = self._model
        z = x if weights.down_weight is None else linear(x, weights.down_weight)
        ids = torch.empty(x.shape[0], model.top_k, dtype=torch.int32, device=x.device)
        shares = torch.empty(x.shape[0], model.top_k, dtype=torch.float32, device=x.device)
        router.stock(
            logits=functional.linear(x.float(), weights.router_weight.float()),
            bias=weights.router_bias,
            ids=ids,
            weights=shares,
            scale=model.routed_scale,
        )
        self.choice = ids
        activation = situ if model.is_situ else _silu
        routed = experts.combine(z, ids, shares, self._experts_of(index, weights), activation)
        routed = yield from reduce(routed, self._tp)
        shared = self._mlp(x, weights.shared_gate_up, weights.shared_down)
        shared = yield from reduce(shared, self._tp)
        if weights.latent_norm is None or weights.up_weight is None:
            return routed + shared
        out = torch.empty_like(x)
        latent_tail.stock(
            latent=routed,
            norm_weight=weights.latent_norm,
            up_weight=weights.up_weight,
            shared=shared,
            out=out,
            eps=model.norm_eps,
        )
        return out

    def _mlp(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        activation = situ if self._model.is_situ else _silu
        return linear(activation(gate, up).to(torch.bfloat16), down)

    def _experts_of(self, index: int, weights: MoeWeights) -> experts.WeightsOf:
        if self._unpacked is not None:
            first, second = self._unpacked[index]
            return lambda expert: (first[expert], second[expert])
        return experts.unpacked(weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)


class _Stream:
    """The residual stream of some rows: AttnRes where the model has it, a plain sum elsewhere."""

    def __init__(self, prefix: torch.Tensor, blocks: int, eps: float) -> None:
        self._prefix, self._eps = prefix, eps
        self._blocks = prefix.new_zeros(prefix.shape[0], blocks, prefix.shape[1])
        self.delta: torch.Tensor | None = None
        """Output of the sublayer before."""

    def read(self, mix: Mix | None, score: torch.Tensor | None, norm: torch.Tensor) -> torch.Tensor:
        """Takes the delta in and gives the next sublayer's normed input."""
        delta, self.delta = self.delta, None
        if mix is None or score is None:
            self._prefix = self._prefix if delta is None else self._prefix + delta
            return rms_norm(self._prefix, norm, self._eps)
        if mix.restarts:
            assert delta is not None
            self._prefix, delta = delta.clone(), None
        out = torch.empty_like(self._prefix)
        attn_res.stock(
            prefix=self._prefix,
            delta=delta,
            blocks=self._blocks,
            blocks_read=mix.blocks_read,
            write_index=mix.write_index,
            score_weight=score,
            norm_weight=norm,
            out=out,
            eps=self._eps,
        )
        return out

    def keep_last_row(self) -> None:
        """Forgets every row but the last."""
        self._prefix, self._blocks = self._prefix[-1:].clone(), self._blocks[-1:].clone()
        self.delta = None if self.delta is None else self.delta[-1:]


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate.float()) * up.float()


def _unpacked_experts(weights: ModelWeights) -> dict[int, tuple[torch.Tensor, torch.Tensor]] | None:
    """Every layer's experts in bf16, where they are small."""
    layers = {i: layer.ffn for i, layer in enumerate(weights.layers) if isinstance(layer.ffn, MoeWeights)}
    if sum(4 * (ffn.w13.numel() + ffn.w2.numel()) for ffn in layers.values()) > UNPACKED_EXPERT_BYTES:
        return None
    return {
        i: (
            dequantise(ffn.w13, ffn.w13_scale, torch.bfloat16),
            dequantise(ffn.w2, ffn.w2_scale, torch.bfloat16),
        )
        for i, ffn in layers.items()
    }
