"""vLLM's K3 backbone as the weights and sizes that the fused ops take. Reads modules, copies nothing large.

Raises `ValueError` for a backbone that the ops do not cover; `unsupported` says why in words before any
weight is read.
"""

from typing import Any

import torch

from k3_decode.decode import is_supported
from k3_decode.rank_weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, MoeWeights
from k3_decode.shapes import K3Shapes, RankShapes

__all__ = ["layer_weights", "rank_shapes", "score_of", "unsupported_model"]

SITU = (4.0, 25.0)
"""Beta and linear beta that the kernels have built in."""


def rank_shapes(config: Any, tp: int) -> RankShapes:
    """Sizes of one rank; `config` is the Hugging Face text config that vLLM serves."""
    linear, hidden = config.linear_attn_config, config.hidden_size
    kda = linear["kda_layers"]  # counted from 1
    layers = config.num_hidden_layers
    model = K3Shapes(
        name="served",
        hidden=hidden,
        layers=layers,
        heads=config.num_attention_heads,
        experts=config.num_experts,
        top_k=config.num_experts_per_token,
        latent=config.routed_expert_hidden_size or hidden,
        expert_inter=config.moe_intermediate_size,
        shared_inter=config.moe_intermediate_size * config.num_shared_experts,
        dense_inter=config.intermediate_size,
        vocab=config.vocab_size,
        q_lora=config.q_lora_rank,
        attn_res_block=config.attn_res_block_size,
        head_dim=linear["head_dim"],
        conv_width=linear["short_conv_kernel_size"],
        has_latent_moe=config.routed_expert_hidden_size is not None and bool(config.latent_moe_use_norm),
        has_full_rank_gate=bool(linear.get("use_full_rank_gate")),
        has_mla_gate=bool(config.mla_use_output_gate),
        is_situ=config.hidden_act == "situ",
        decay_lower_bound=linear.get("gate_lower_bound"),
        routed_scale=config.routed_scaling_factor,
        norm_eps=config.rms_norm_eps,
        max_context=config.max_position_embeddings,
        mla_layers=tuple(layer for layer in range(layers) if layer + 1 not in kda),
    )
    return model.rank(tp)


def unsupported_model(config: Any) -> str | None:
    """Why the fused ops do not cover the model; None where they do."""
    linear = config.linear_attn_config or {}
    checks = (
        (not config.attn_res_block_size, "a model without attention residuals"),
        (config.q_lora_rank is None, "a query of full rank"),
        (
            config.routed_expert_hidden_size is None or not config.latent_moe_use_norm,
            "experts without latent",
        ),
        (not linear.get("use_full_rank_gate"), "a low-rank output gate"),
        (not config.mla_use_output_gate, "MLA without an output gate"),
        (
            (config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
            != ("situ", *SITU),
            "an activation other than SiTU 4/25",
        ),
        (config.num_expert_group != 1 or config.topk_group != 1, "grouped experts"),
        (config.moe_router_activation_func != "sigmoid" or not config.moe_renormalize, "another router"),
        (linear.get("head_dim") != 128 or config.kv_lora_rank != 512, "other head sizes"),
        (
            config.first_k_dense_replace != 1 or config.moe_layer_freq != 1,
            "other dense layers than the first",
        ),
    )
    return next((words for failed, words in checks if failed), None)


def layer_weights(layer: Any, shapes: RankShapes) -> LayerWeights:
    """One decoder layer; raises `ValueError` where the ops do not cover the model.

    The experts' tensors are what vLLM keeps after loading, in its kernel's layout: whoever binds the layer
    has laid them out for the ops before.
    """
    if not is_supported(shapes.model):
        raise ValueError("the fused ops do not cover this model; only the stock path runs it")
    is_mla = shapes.model.is_mla(layer.layer_idx)
    return LayerWeights(
        attention_score=score_of(layer.self_attention_res_norm, layer.self_attention_res_proj),
        attention_norm=layer.input_layernorm.weight.data,
        attention=_mla(layer.self_attn) if is_mla else _kda(layer.self_attn, shapes),
        ffn_score=score_of(layer.mlp_res_norm, layer.mlp_res_proj),
        ffn_norm=layer.post_attention_layernorm.weight.data,
        ffn=_moe(layer.mlp) if layer.is_moe_layer else _dense(layer.mlp),
    )


def score_of(norm: Any, projection: Any) -> torch.Tensor:
    """fp32 [D]: norm times pseudo-query."""
    score: torch.Tensor = norm.weight.data.float() * projection.weight.data[0].float()
    return score.contiguous()


def _kda(attention: Any, shapes: RankShapes) -> KdaWeights:
    taps = attention.conv1d.weight.data.view(3, shapes.channels, shapes.model.conv_width)
    return KdaWeights(
        in_proj=attention.in_proj_qkvgfab.weight.data,
        gate_b=None,
        conv_weight=taps.float().transpose(1, 2).contiguous(),
        decay_weight=attention.f_b_proj.weight.data,
        a_log=attention.A_log.data.float(),
        dt_bias=attention.dt_bias.data.float(),
        norm_weight=attention.o_norm.weight.data.float(),
        out_proj=attention.o_proj.weight.data,
    )


def _mla(attention: Any) -> MlaWeights:
    return MlaWeights(
        in_proj=attention.fused_qkv_a_g_proj.weight.data,
        q_norm=attention.q_a_layernorm.weight.data,
        q_weight=attention.q_b_proj.weight.data,
        kv_norm=attention.kv_a_layernorm.weight.data,
        uk_weight=attention.W_UK_T.data.contiguous(),
        uv_weight=attention.W_UV.data.contiguous(),
        out_proj=attention.o_proj.weight.data,
    )


def _moe(moe: Any) -> MoeWeights:
    routed = moe.experts.routed_experts
    return MoeWeights(
        router_weight=moe.gate.weight.data,
        router_bias=moe.gate.e_score_correction_bias.data.float(),
        down_weight=moe.routed_expert_down_proj.weight.data,
        w13=routed.w13_weight.data,
        w13_scale=routed.w13_weight_scale.data,
        w2=routed.w2_weight.data,
        w2_scale=routed.w2_weight_scale.data,
        latent_norm=moe.routed_expert_norm.weight.data,
        up_weight=moe.routed_expert_up_proj.weight.data,
        shared_gate_up=moe.shared_experts.gate_up_proj.weight.data,
        shared_down=moe.shared_experts.down_proj.weight.data,
    )


def _dense(mlp: Any) -> DenseWeights:
    return DenseWeights(gate_up=mlp.gate_up_proj.weight.data, down=mlp.down_proj.weight.data)
