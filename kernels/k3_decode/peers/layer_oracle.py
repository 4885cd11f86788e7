"""A whole layer in float64, from the ops' oracles, on the inputs that both arms were given.

Nothing is rounded but the stream's prefix. The routed experts are those an arm chose, so that an arm is not
blamed for a near tie; `regret` says how far its choice is from the 16 best.
"""

from dataclasses import dataclass

import torch

from k3_decode.model import SOFTMAX_SCALE
from k3_decode.ops import OPS
from k3_decode.ops.mla_attend import LSE_BASE
from k3_decode.peers.layer_arms import FIRST_LAYER, Case, Memory
from k3_decode.rank_weights import KdaWeights, LayerWeights, MoeWeights
from k3_decode.residuals import before_attention, before_ffn

__all__ = ["LayerTruth", "row_errors", "truth_before_experts"]


@dataclass(frozen=True, slots=True)
class LayerTruth:
    """A layer up to its routed experts; `after` finishes it."""

    layer: LayerWeights
    eps: float
    x: torch.Tensor
    """float64 [B, hidden]: what the FFN takes."""
    prefix: torch.Tensor
    state: torch.Tensor | None
    scores: torch.Tensor
    """float64 [B, experts]: score and bias."""
    raw: torch.Tensor

    def regret(self, ids: torch.Tensor) -> float:
        """Largest difference between the sixteenth best score and the worst one chosen."""
        best = self.scores.sort(1, descending=True).values[:, ids.shape[1] - 1]
        return float((best - self.scores.gather(1, ids.long()).min(1).values).clamp(min=0).max())

    def after(self, ids: torch.Tensor) -> torch.Tensor:
        """float64 [B, hidden]: the layer's output for the experts chosen."""
        ffn = self.layer.ffn
        assert isinstance(ffn, MoeWeights)
        assert ffn.down_weight is not None
        assert ffn.latent_norm is not None
        assert ffn.up_weight is not None
        chosen = self.raw.gather(1, ids.long())
        routed = OPS["experts"].oracle(
            {
                "latent": self.x @ ffn.down_weight.double().T,
                "ids": ids,
                "weights": chosen / (chosen.sum(1, keepdim=True) + 1e-20),
                "w13": ffn.w13,
                "w13_scale": ffn.w13_scale,
                "w2": ffn.w2,
                "w2_scale": ffn.w2_scale,
            }
        )["out"]
        shared = OPS["situ_mlp"].oracle(
            {"x": self.x, "gate_up_weight": ffn.shared_gate_up, "down_weight": ffn.shared_down}
        )["out"]
        normed = routed * torch.rsqrt(routed.square().mean(1, keepdim=True) + self.eps)
        return shared + (normed * ffn.latent_norm.double()) @ ffn.up_weight.double().T


def truth_before_experts(
    layer: LayerWeights, index: int, case: Case, memory: Memory, prefix: torch.Tensor, delta: torch.Tensor
) -> LayerTruth:
    """Float64 up to the router's scores. `memory` is as it was before the step; nothing is changed."""
    model, attention, ffn = case.shapes.model, layer.attention, layer.ffn
    assert isinstance(ffn, MoeWeights)
    place, block = FIRST_LAYER + index, model.attn_res_block or 0

    def mixed(stream: torch.Tensor, more: torch.Tensor, reads: int, which: str) -> dict[str, torch.Tensor]:
        return dict(
            OPS["attn_res"].oracle(
                {
                    "prefix": stream,
                    "delta": more,
                    "blocks": memory.blocks,
                    "blocks_read": reads,
                    "write_index": -1,
                    "score_weight": getattr(layer, f"{which}_score"),
                    "norm_weight": getattr(layer, f"{which}_norm"),
                    "eps": model.norm_eps,
                }
            )
        )

    first = mixed(prefix, delta, before_attention(place, block).blocks_read, "attention")
    packed = first["out"] @ attention.in_proj.double().T
    state = None
    if isinstance(attention, KdaWeights):
        found = OPS["kda_step"].oracle(
            {
                "packed": packed,
                "conv_weight": attention.conv_weight,
                "decay_weight": attention.decay_weight,
                "a_log": attention.a_log,
                "dt_bias": attention.dt_bias,
                "norm_weight": attention.norm_weight,
                "conv_state": memory.caches.kda[index].conv,
                "state": memory.caches.kda[index].recurrent,
                "slots": memory.step.slots,
                "accepted": None,
                "rows": 1,
                "lower_bound": model.decay_lower_bound,
                "eps": model.norm_eps,
            }
        )
        core, state = found["out"], found["state"]
    else:
        core = _mla_truth(layer, index, case, memory, packed)
    attended = core @ attention.out_proj.double().T
    second = mixed(first["prefix"], attended, before_ffn(place, block).blocks_read, "ffn")
    raw = torch.sigmoid(second["out"] @ ffn.router_weight.double().T)
    return LayerTruth(
        layer=layer,
        eps=model.norm_eps,
        x=second["out"],
        prefix=second["prefix"],
        state=state,
        scores=raw + ffn.router_bias.double(),
        raw=raw,
    )


def _mla_truth(
    layer: LayerWeights, index: int, case: Case, memory: Memory, packed: torch.Tensor
) -> torch.Tensor:
    model, attention, step = case.shapes.model, layer.attention, memory.step
    assert not isinstance(attention, KdaWeights)
    cache = memory.caches.mla[index]
    asked = OPS["mla_query"].oracle(
        {
            "packed": packed,
            "q_norm": attention.q_norm,
            "kv_norm": attention.kv_norm,
            "q_weight": attention.q_weight,
            "uk_weight": attention.uk_weight,
            "cache": cache,
            "slot_mapping": step.slot_mapping,
            "query": torch.empty(case.requests, case.shapes.heads, 576, device=cache.device),
            "kv_scale": 1.0,
            "eps": model.norm_eps,
        }
    )
    found = OPS["mla_attend"].oracle(
        {
            "query": asked["query"],
            "cache": asked["cache"],
            "block_table": step.block_table,
            "lengths": step.lengths,
            "rows": 1,
            "scale": SOFTMAX_SCALE,
            "kv_scale": 1.0,
        }
    )
    values = OPS["mla_value"].oracle(
        {
            "partial": found["out"].unsqueeze(0),
            "partial_lse": found["lse"].unsqueeze(0),
            "uv_weight": attention.uv_weight,
            "gate": packed[:, -case.shapes.channels :],
            "lse_base": LSE_BASE,
        }
    )
    return values["out"]


def row_errors(value: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each token, in float64."""
    return (value.double() - truth).norm(dim=1) / truth.norm(dim=1)
