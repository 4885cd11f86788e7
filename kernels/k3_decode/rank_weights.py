"""One tensor-parallel rank's weights, in the layouts that the fused ops take.

Heads, FFN widths and vocabulary rows are divided; norms, low-rank projections, router and latent projections
are whole on every rank. Stock and optimised path read the same tensors. P = 128 heads of this rank.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from k3_decode.shapes import MXFP4_GROUP, K3Shapes, RankShapes

__all__ = [
    "DenseWeights",
    "KdaWeights",
    "LayerWeights",
    "MlaWeights",
    "ModelWeights",
    "MoeWeights",
    "TensorSource",
    "shard",
]

UNIT_SCALE = 127
"""E8M0 byte of padded groups; their codes are zero."""


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or draws."""

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A tensor, or the part `index` of it."""
        ...


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """A KDA layer."""

    in_proj: torch.Tensor
    """[kda_in_rows, D] in rows q, k, v, g, f_a, beta, pad; a low-rank gate has g_a in g's place."""
    gate_b: torch.Tensor | None
    """[P, 128] of a low-rank gate."""
    conv_weight: torch.Tensor
    """fp32 [3, 4, P]."""
    decay_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    out_proj: torch.Tensor
    """[D, P]."""


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """An MLA layer."""

    in_proj: torch.Tensor
    """[mla_in_rows, D] in rows q_a (or q), latent, k_pe, gate."""
    q_norm: torch.Tensor | None
    q_weight: torch.Tensor | None
    """[192 H, q_lora]; None, as is `q_norm`, where the query has full rank."""
    kv_norm: torch.Tensor
    uk_weight: torch.Tensor
    """[H, 128, 512]."""
    uv_weight: torch.Tensor
    """[H, 512, 128]."""
    out_proj: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """An MoE layer's FFN."""

    router_weight: torch.Tensor
    router_bias: torch.Tensor
    down_weight: torch.Tensor | None
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    latent_norm: torch.Tensor | None
    up_weight: torch.Tensor | None
    """None, as are `down_weight` and `latent_norm`, without latent MoE."""
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Layer 0's FFN."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer; scores are fp32 [D], norm times pseudo-query, and None without AttnRes."""

    attention_score: torch.Tensor | None
    attention_norm: torch.Tensor
    attention: KdaWeights | MlaWeights
    ffn_score: torch.Tensor | None
    ffn_norm: torch.Tensor
    ffn: MoeWeights | DenseWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A rank's share of a model."""

    shapes: RankShapes
    rank: int
    embedding: torch.Tensor
    """[vocab, D], whole."""
    layers: tuple[LayerWeights, ...]
    final_score: torch.Tensor | None
    final_norm: torch.Tensor
    head: torch.Tensor
    """[vocab / tp, D]."""


def shard(source: TensorSource, shapes: RankShapes, rank: int, device: torch.device) -> ModelWeights:
    """Reads the share of rank `rank`; only that share is read from disk.

    Raises `ValueError` where a width cannot be cut: experts in parts of whole MXFP4 groups or of 16 or fewer
    columns that divide a group, everything else evenly.
    """
    if not 0 <= rank < shapes.tp:
        raise ValueError(f"rank {rank} is not one of {shapes.tp}")
    return _Reader(source, shapes, rank, device).model()


class _Reader:
    """Cuts one rank's part out of a source."""

    def __init__(self, source: TensorSource, shapes: RankShapes, rank: int, device: torch.device) -> None:
        self._source, self._shapes, self._rank, self._device = source, shapes, rank, device

    def model(self) -> ModelWeights:
        """Every tensor of the rank."""
        model = self._shapes.model
        has_residual = model.attn_res_block is not None
        return ModelWeights(
            shapes=self._shapes,
            rank=self._rank,
            embedding=self._whole("model.embed_tokens.weight"),
            layers=tuple(self._layer(model, layer) for layer in range(model.layers)),
            final_score=self._score("model.output_attn_res") if has_residual else None,
            final_norm=self._whole("model.norm.weight"),
            head=self._rows("lm_head.weight", model.vocab),
        )

    def _layer(self, model: K3Shapes, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        has_residual = model.attn_res_block is not None
        attend = self._mla if model.is_mla(layer) else self._kda
        return LayerWeights(
            attention_score=self._score(f"{prefix}self_attention_res") if has_residual else None,
            attention_norm=self._whole(f"{prefix}input_layernorm.weight"),
            attention=attend(f"{prefix}self_attn."),
            ffn_score=self._score(f"{prefix}mlp_res") if has_residual else None,
            ffn_norm=self._whole(f"{prefix}post_attention_layernorm.weight"),
            ffn=self._dense(f"{prefix}mlp.") if layer == 0 else self._moe(f"{prefix}block_sparse_moe."),
        )

    def _kda(self, prefix: str) -> KdaWeights:
        model = self._shapes.model
        width = model.heads * model.head_dim
        parts = [self._rows(f"{prefix}{part}_proj.weight", width) for part in "qkv"]
        if model.has_full_rank_gate:
            parts.append(self._rows(f"{prefix}g_proj.weight", width))
            gate_b = None
        else:
            parts.append(self._whole(f"{prefix}g_a_proj.weight"))
            gate_b = self._rows(f"{prefix}g_b_proj.weight", width)
        parts.append(self._whole(f"{prefix}f_a_proj.weight"))
        parts.append(self._rows(f"{prefix}b_proj.weight", model.heads))
        rows = sum(len(part) for part in parts)
        parts.append(parts[0].new_zeros(-rows % 16, model.hidden))
        taps = [self._rows(f"{prefix}{part}_conv1d.weight", width).float()[:, 0].T for part in "qkv"]
        return KdaWeights(
            in_proj=torch.cat(parts),
            gate_b=gate_b,
            conv_weight=torch.stack(taps).contiguous(),
            decay_weight=self._rows(f"{prefix}f_b_proj.weight", width),
            a_log=self._rows(f"{prefix}A_log", model.heads).float(),
            dt_bias=self._rows(f"{prefix}dt_bias", width).float(),
            norm_weight=self._whole(f"{prefix}o_norm.weight").float(),
            out_proj=self._columns(f"{prefix}o_proj.weight", width),
        )

    def _mla(self, prefix: str) -> MlaWeights:
        model, heads = self._shapes.model, self._shapes.heads
        query = model.heads * (model.qk_nope + model.qk_rope)
        has_rank = model.q_lora is not None
        first = (
            self._whole(f"{prefix}q_a_proj.weight")
            if has_rank
            else self._rows(f"{prefix}q_proj.weight", query)
        )
        parts = [first, self._whole(f"{prefix}kv_a_proj_with_mqa.weight")]
        if model.has_mla_gate:
            parts.append(self._rows(f"{prefix}g_proj.weight", model.heads * model.v_dim))
        both = self._rows(f"{prefix}kv_b_proj.weight", model.heads * (model.qk_nope + model.v_dim))
        both = both.view(heads, model.qk_nope + model.v_dim, model.kv_lora)
        return MlaWeights(
            in_proj=torch.cat(parts),
            q_norm=self._whole(f"{prefix}q_a_layernorm.weight") if has_rank else None,
            q_weight=self._rows(f"{prefix}q_b_proj.weight", query) if has_rank else None,
            kv_norm=self._whole(f"{prefix}kv_a_layernorm.weight"),
            uk_weight=both[:, : model.qk_nope].contiguous(),
            uv_weight=both[:, model.qk_nope :].transpose(1, 2).contiguous(),
            out_proj=self._columns(f"{prefix}o_proj.weight", model.heads * model.v_dim),
        )

    def _dense(self, prefix: str) -> DenseWeights:
        gate_up, down = self._mlp(prefix, self._shapes.model.dense_inter)
        return DenseWeights(gate_up, down)

    def _moe(self, prefix: str) -> MoeWeights:
        model = self._shapes.model
        is_latent = model.has_latent_moe
        gate_up, down = self._mlp(f"{prefix}shared_experts.", model.shared_inter)
        w13, w13_scale = self._first_experts(f"{prefix}experts.w13_weight")
        w2, w2_scale = self._second_experts(f"{prefix}experts.w2_weight")
        return MoeWeights(
            router_weight=self._whole(f"{prefix}gate.weight"),
            router_bias=self._whole(f"{prefix}gate.e_score_correction_bias").float(),
            down_weight=self._whole(f"{prefix}latent_down_proj.weight") if is_latent else None,
            w13=w13,
            w13_scale=w13_scale,
            w2=w2,
            w2_scale=w2_scale,
            latent_norm=self._whole(f"{prefix}routed_expert_norm.weight") if is_latent else None,
            up_weight=self._whole(f"{prefix}latent_up_proj.weight") if is_latent else None,
            shared_gate_up=gate_up,
            shared_down=down,
        )

    def _mlp(self, prefix: str, inter: int) -> tuple[torch.Tensor, torch.Tensor]:
        gate = self._rows(f"{prefix}gate_proj.weight", inter)
        up = self._rows(f"{prefix}up_proj.weight", inter)
        return torch.cat((gate, up)), self._columns(f"{prefix}down_proj.weight", inter)

    def _first_experts(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up rows of the rank, each padded to the rank's expert width."""
        inter = self._shapes.model.expert_inter
        start, stop = self._share(name, inter)
        padding = self._shapes.expert_inter - (stop - start)
        every = slice(None)
        packed, scales = [], []
        for half in (0, inter):
            rows = slice(half + start, half + stop)
            packed.append(_pad(self._read(name, every, rows), 1, padding, 0))
            scales.append(_pad(self._read(f"{name}_scale", every, rows), 1, padding, UNIT_SCALE))
        return torch.cat(packed, 1), torch.cat(scales, 1)

    def _second_experts(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the rank, padded to the rank's expert width."""
        start, stop = self._share(name, self._shapes.model.expert_inter)
        width, every = stop - start, slice(None)
        if width % MXFP4_GROUP and (MXFP4_GROUP % width or width % 2):
            raise ValueError(f"{name}: {width} columns a rank are no whole MXFP4 groups and no part of one")
        packed = self._read(name, every, every, slice(start // 2, stop // 2))
        first, last = start // MXFP4_GROUP, -(-stop // MXFP4_GROUP)
        scales = self._read(f"{name}_scale", every, every, slice(first, last))
        padded = self._shapes.expert_inter
        packed = _pad(packed, 2, (padded - width) // 2, 0)
        return packed, _pad(scales, 2, padded // MXFP4_GROUP - (last - first), UNIT_SCALE)

    def _score(self, prefix: str) -> torch.Tensor:
        norm = self._whole(f"{prefix}_norm.weight").float()
        return norm * self._whole(f"{prefix}_proj.weight").float()[0]

    def _whole(self, name: str) -> torch.Tensor:
        return self._read(name)

    def _rows(self, name: str, count: int) -> torch.Tensor:
        return self._read(name, slice(*self._share(name, count)))

    def _columns(self, name: str, count: int) -> torch.Tensor:
        return self._read(name, slice(None), slice(*self._share(name, count)))

    def _share(self, name: str, count: int) -> tuple[int, int]:
        if count % self._shapes.tp:
            raise ValueError(f"{name}: {count} cannot be divided over {self._shapes.tp} ranks")
        width = count // self._shapes.tp
        return self._rank * width, (self._rank + 1) * width

    def _read(self, name: str, *index: slice) -> torch.Tensor:
        return self._source.read(name, *index).to(self._device).contiguous()


def _pad(tensor: torch.Tensor, axis: int, count: int, value: int) -> torch.Tensor:
    """`count` more entries of `value` at the end of an axis."""
    if count == 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = count
    return torch.cat((tensor, tensor.new_full(shape, value)), axis)
