"""The whole model in float64, one token after another, written from the formulas.

It shares no code with the stock or the optimised path and reads the checkpoint by tensor name, unsharded and
unpacked. Nothing is rounded: no bf16 activations, no cache precision. Attention uses per-head keys and values
rather than the latent form, and the residual stream keeps every sublayer's output. For nano-sized models.
"""

import copy
import math
from dataclasses import dataclass, field

import torch

from k3_decode.ops.mxfp4 import dequantise
from k3_decode.rank_weights import TensorSource
from k3_decode.shapes import K3Shapes

__all__ = ["MEAN_KL_BOUND", "TOKEN_KL_BOUND", "Memory", "Oracle"]

TOKEN_KL_BOUND = 0.01
"""KL(oracle || path) in nats that no token of nano may reach. Measured over seeds 0 to 5, both paths, bf16
and fp8 caches, one and two ranks: at most 0.005.
"""
MEAN_KL_BOUND = 0.002
"""Of the mean over a text; measured: at most 0.0009."""


@dataclass(slots=True)
class Memory:
    """What one sequence has left behind; lists and dicts by layer."""

    inputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """KDA: the convolution's last three inputs."""
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    """KDA: [H, V, K]."""
    keys: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """MLA: [H, 192] a token."""
    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def copy(self) -> "Memory":
        """A memory that can go its own way."""
        return copy.deepcopy(self)


class Oracle:
    """Float64 truth of a model's logits."""

    def __init__(self, source: TensorSource, shapes: K3Shapes) -> None:
        self._source, self._shapes = source, shapes
        self._cache: dict[str, torch.Tensor] = {}

    def logits(self, tokens: list[int], memory: Memory) -> torch.Tensor:
        """[T, vocab] after each of `tokens`, which follow what `memory` holds; the memory takes them in."""
        return torch.stack([self._token(token, memory) for token in tokens])

    def _token(self, token: int, memory: Memory) -> torch.Tensor:
        shapes = self._shapes
        outputs = [self._tensor("model.embed_tokens.weight")[token]]
        """The embedding and every sublayer's output so far."""
        for layer in range(shapes.layers):
            prefix = f"model.layers.{layer}."
            x = self._stream(outputs, f"{prefix}self_attention_res", f"{prefix}input_layernorm.weight")
            attend = self._mla if shapes.is_mla(layer) else self._kda
            outputs.append(attend(layer, f"{prefix}self_attn.", x, memory))
            x = self._stream(outputs, f"{prefix}mlp_res", f"{prefix}post_attention_layernorm.weight")
            if layer == 0:
                outputs.append(self._gated_mlp(f"{prefix}mlp.", x))
            else:
                outputs.append(self._moe(f"{prefix}block_sparse_moe.", x))
        x = self._stream(outputs, "model.output_attn_res", "model.norm.weight")
        return self._tensor("lm_head.weight") @ x

    def _stream(self, outputs: list[torch.Tensor], residual: str, norm: str) -> torch.Tensor:
        """The next sublayer's input, from the embedding and the outputs of all sublayers before it.

        Without AttnRes: their sum. With blocks of b layers, finished block 0 is the embedding and block j > 0
        the sum of the outputs of layers b(j-1) to bj-1; the unfinished rest is the sum since then. A sublayer
        that is the first of a block still takes the rest for a source of its own: the block that it finishes.
        """
        shapes = self._shapes
        if shapes.attn_res_block is None:
            return self._rms_norm(torch.stack(outputs).sum(0), self._tensor(norm))
        per_block = 2 * shapes.attn_res_block
        sources = [outputs[0]]
        starts = range(1, len(outputs), per_block)
        sources += [torch.stack(outputs[first : first + per_block]).sum(0) for first in starts]
        key = self._tensor(f"{residual}_norm.weight") * self._tensor(f"{residual}_proj.weight")[0]
        scores = [(source @ key) / self._root_mean_square(source) for source in sources]
        shares = torch.softmax(torch.stack(scores), dim=0)
        mix = sum(
            (share * source for share, source in zip(shares, sources, strict=True)), torch.zeros_like(key)
        )
        return self._rms_norm(mix, self._tensor(norm))

    def _kda(self, layer: int, prefix: str, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        shapes = self._shapes
        heads, size = shapes.heads, shapes.head_dim
        mixed = torch.cat([self._linear(f"{prefix}{part}_proj.weight", x) for part in "qkv"])
        taps = torch.cat([self._tensor(f"{prefix}{part}_conv1d.weight")[:, 0] for part in "qkv"])
        inputs = memory.inputs.setdefault(layer, [torch.zeros_like(mixed) for _ in range(3)])
        inputs.append(mixed)
        u = sum((taps[:, i] * inputs[i] for i in range(4)), torch.zeros_like(mixed))
        del inputs[0]
        q, k, v = (u / (1 + torch.exp(-u))).view(3, heads, size)
        q = q / torch.sqrt((q * q).sum(1, keepdim=True) + 1e-6) / math.sqrt(size)
        k = k / torch.sqrt((k * k).sum(1, keepdim=True) + 1e-6)
        raw = self._linear(f"{prefix}f_b_proj.weight", self._linear(f"{prefix}f_a_proj.weight", x))
        raw = (raw + self._tensor(f"{prefix}dt_bias")).view(heads, size)
        rate = torch.exp(self._tensor(f"{prefix}A_log"))[:, None]
        if shapes.decay_lower_bound is None:
            g = -rate * torch.log1p(torch.exp(raw))
        else:
            g = shapes.decay_lower_bound / (1 + torch.exp(-rate * raw))
        beta = 1 / (1 + torch.exp(-self._linear(f"{prefix}b_proj.weight", x)))

        empty = torch.zeros(heads, size, size, dtype=torch.float64)
        state = memory.states.get(layer, empty) * torch.exp(g)[:, None, :]
        error = v - torch.einsum("hvk,hk->hv", state, k)
        state = state + torch.einsum("h,hv,hk->hvk", beta, error, k)
        memory.states[layer] = state
        read = self._rms_norm(torch.einsum("hvk,hk->hv", state, q), self._tensor(f"{prefix}o_norm.weight"))

        if shapes.has_full_rank_gate:
            gate = self._linear(f"{prefix}g_proj.weight", x)
        else:
            gate = self._linear(f"{prefix}g_b_proj.weight", self._linear(f"{prefix}g_a_proj.weight", x))
        return self._linear(f"{prefix}o_proj.weight", read.flatten() / (1 + torch.exp(-gate)))

    def _mla(self, layer: int, prefix: str, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        shapes = self._shapes
        heads, nope, rope = shapes.heads, shapes.qk_nope, shapes.qk_rope
        if shapes.q_lora is None:
            q = self._linear(f"{prefix}q_proj.weight", x)
        else:
            low = self._linear(f"{prefix}q_a_proj.weight", x)
            low = self._rms_norm(low, self._tensor(f"{prefix}q_a_layernorm.weight"))
            q = self._linear(f"{prefix}q_b_proj.weight", low)
        q = q.view(heads, nope + rope)
        compressed = self._linear(f"{prefix}kv_a_proj_with_mqa.weight", x)
        latent = self._rms_norm(compressed[: shapes.kv_lora], self._tensor(f"{prefix}kv_a_layernorm.weight"))
        kv = self._linear(f"{prefix}kv_b_proj.weight", latent).view(heads, nope + shapes.v_dim)
        shared = compressed[shapes.kv_lora :].expand(heads, rope)
        keys = memory.keys.setdefault(layer, [])
        values = memory.values.setdefault(layer, [])
        keys.append(torch.cat((kv[:, :nope], shared), dim=1))
        values.append(kv[:, nope:])
        scores = torch.einsum("hd,nhd->hn", q, torch.stack(keys)) / math.sqrt(nope + rope)
        mixed = torch.einsum("hn,nhv->hv", torch.softmax(scores, dim=1), torch.stack(values)).flatten()
        if shapes.has_mla_gate:
            mixed = mixed / (1 + torch.exp(-self._linear(f"{prefix}g_proj.weight", x)))
        return self._linear(f"{prefix}o_proj.weight", mixed)

    def _moe(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        shapes = self._shapes
        scores = 1 / (1 + torch.exp(-self._linear(f"{prefix}gate.weight", x)))
        keys = (scores + self._tensor(f"{prefix}gate.e_score_correction_bias")).tolist()
        chosen = sorted(range(shapes.experts), key=lambda expert: (-keys[expert], expert))[: shapes.top_k]
        total = scores[chosen].sum() + 1e-20
        z = self._linear(f"{prefix}latent_down_proj.weight", x) if shapes.has_latent_moe else x
        first = self._mxfp4(f"{prefix}experts.w13_weight")
        second = self._mxfp4(f"{prefix}experts.w2_weight")
        routed = torch.zeros_like(z)
        for expert in chosen:
            gate, up = (first[expert] @ z).chunk(2)
            share = shapes.routed_scale * scores[expert] / total
            routed = routed + share * (second[expert] @ self._glu(gate, up))
        if shapes.has_latent_moe:
            normed = self._rms_norm(routed, self._tensor(f"{prefix}routed_expert_norm.weight"))
            routed = self._linear(f"{prefix}latent_up_proj.weight", normed)
        return routed + self._gated_mlp(f"{prefix}shared_experts.", x)

    def _gated_mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate = self._linear(f"{prefix}gate_proj.weight", x)
        up = self._linear(f"{prefix}up_proj.weight", x)
        return self._linear(f"{prefix}down_proj.weight", self._glu(gate, up))

    def _glu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not self._shapes.is_situ:
            return gate / (1 + torch.exp(-gate)) * up
        return 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)

    def _root_mean_square(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((x * x).mean(-1, keepdim=True) + self._shapes.norm_eps)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / self._root_mean_square(x) * weight

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._tensor(name) @ x

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._cache:
            self._cache[name] = self._source.read(name).cpu().double()
        return self._cache[name]

    def _mxfp4(self, name: str) -> torch.Tensor:
        if name not in self._cache:
            packed, scales = self._source.read(name).cpu(), self._source.read(f"{name}_scale").cpu()
            self._cache[name] = dequantise(packed, scales)
        return self._cache[name]
