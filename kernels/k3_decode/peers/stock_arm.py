"""Stock's layers over the very weights and states of the optimised arm.

vLLM 0.33.0's kernels by `stock_layer.py`; experts by Marlin or Humming, MLA's core by FlashMLA or FA3-MLA.
"""

from typing import Any, cast

import torch

from k3_decode.peers.flash_attention import fa3_mla, make_schedule
from k3_decode.peers.layer_arms import Case, Memory
from k3_decode.peers.stock_layer import MLA_SCALE, PAGE, StockLayer
from k3_decode.rank_weights import KdaWeights, LayerWeights, MlaWeights, MoeWeights

__all__ = ["StockArm", "marlin_weights", "stock_weights"]

MARLIN_SCALES = tuple(i + 8 * j for i in range(8) for j in range(8))
"""Order in which Marlin reads 64 neighbouring scales."""


def stock_weights(layer: LayerWeights) -> dict[str, Any]:
    """A layer's weights under `stock_layer.py`'s names, without the experts'; nothing is copied but W_UK and
    W_UV, which stock reads from one interleaved matrix."""
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(ffn, MoeWeights)
    assert layer.attention_score is not None
    assert layer.ffn_score is not None
    found: dict[str, Any] = {
        "o_w": attention.out_proj,
        "r_w": ffn.router_weight,
        "r_bias": ffn.router_bias,
        "dn_w": ffn.down_weight,
        "up_w": ffn.up_weight,
        "sgu_w": ffn.shared_gate_up,
        "sd_w": ffn.shared_down,
        "ln": ffn.latent_norm,
    }
    for name, score, norm in (
        ("ar1", layer.attention_score, layer.attention_norm),
        ("ar2", layer.ffn_score, layer.ffn_norm),
    ):
        found[name] = (torch.ones_like(norm), score.to(torch.bfloat16), norm)
    if isinstance(attention, KdaWeights):
        taps = attention.conv_weight
        found |= {
            "in_w": attention.in_proj,
            "fb_w": attention.decay_weight,
            "conv_wm": taps,
            "conv_w": taps.permute(0, 2, 1).reshape(-1, taps.shape[1]).contiguous(),
            "A_log": attention.a_log,
            "dt_bias": attention.dt_bias,
            "onorm": attention.norm_weight.to(torch.bfloat16),
            "onorm_f": attention.norm_weight,
        }
    else:
        found |= _mla_weights(attention)
    return found


def _mla_weights(attention: MlaWeights) -> dict[str, Any]:
    _, nope, _ = attention.uk_weight.shape
    both = torch.cat((attention.uk_weight, attention.uv_weight.transpose(1, 2)), 1).contiguous()
    return {
        "a_w": attention.in_proj,
        "qn": attention.q_norm,
        "kvn": attention.kv_norm,
        "qb_w": attention.q_weight,
        "W_UK_T": both[:, :nope],
        "W_UV": both[:, nope:].transpose(1, 2),
    }


def marlin_weights(layer: LayerWeights) -> dict[str, torch.Tensor]:
    """The experts' MXFP4 weights in Marlin's tiles, by the stock repack op: all experts in one call."""
    ffn = layer.ffn
    assert isinstance(ffn, MoeWeights)
    found = {}
    for name, codes, scales in (("w13", ffn.w13, ffn.w13_scale), ("w2", ffn.w2, ffn.w2_scale)):
        experts, rows, width = codes.shape[0], codes.shape[1], codes.shape[2] * 2
        words = codes.view(torch.int32).permute(2, 0, 1).reshape(width // 8, experts * rows).contiguous()
        tiles = torch.ops._C.gptq_marlin_repack(words, width, experts * rows, 4, False)
        found[name] = tiles.view(width // 16, experts, rows * 2).transpose(0, 1).contiguous()
        del words, tiles
        order = torch.tensor(MARLIN_SCALES, device=codes.device)
        turned = scales.transpose(1, 2).reshape(-1, 64)[:, order]
        turned = turned.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(experts, width // 32, rows)
        found["s13" if name == "w13" else "s2"] = turned.contiguous().view(torch.float8_e8m0fnu)
    return found


class StockArm:
    """The layers through stock's kernels."""

    def __init__(
        self,
        kernels: Any,
        layers: list[dict[str, Any]],
        case: Case,
        memory: Memory,
        pool: torch.Tensor | None,
        humming: Any = None,
        core: str = "flashmla",
    ) -> None:
        self.layer = cast("Any", StockLayer(kernels, case.tp, case.requests))
        self._case, self._memory, self._weights = case, memory, layers
        self._state: dict[str, Any] = {
            "prefix": memory.embedding.clone(),
            "blocks": memory.blocks.clone(),
            "slots": memory.step.slots[:, 0].contiguous(),
        }
        self._layers: list[dict[str, Any]] = []
        for index, weights in enumerate(layers):
            own = dict(weights)
            if case.kind == "kda":
                own["state"] = memory.caches.kda[index].recurrent.clone()
                own["conv_state"] = memory.caches.kda[index].conv.clone()
            else:
                start = memory.first_pages[index]
                own["btab"] = (memory.step.block_table + start).contiguous()
                own["slotmap"] = memory.step.slot_mapping + start * PAGE
            self._layers.append(own)
        if humming is not None:
            self.layer.experts = humming.experts
        if case.kind == "mla":
            assert pool is not None
            self._plan_attention(pool, core)
        self.layer_ids: list[torch.Tensor] = []

    def _plan_attention(self, pool: torch.Tensor, core: str) -> None:
        """The core's schedule, made once a step outside the graph as vLLM does."""
        case, state, heads = self._case, self._state, self._case.shapes.heads
        state["kv"], state["seqlens"] = pool, self._memory.step.lengths
        if core == "fa3":
            schedule = make_schedule(state["seqlens"], case.context, heads)

            def attend(
                mq: torch.Tensor, L: dict[str, Any], st: dict[str, Any], scheduled: bool = True
            ) -> Any:
                return fa3_mla(mq.view(case.requests, heads, 576), pool, L["btab"], schedule, MLA_SCALE)

            self.layer.flashmla = attend
            return
        query = torch.randn(case.requests, 1, heads, 576, device=pool.device).to(torch.bfloat16)
        _, _, state["md"], state["ns"] = torch.ops._flashmla_C.dense_decode_fwd(
            query,
            pool.unsqueeze(-2),
            512,
            state["seqlens"],
            self._layers[0]["btab"],
            MLA_SCALE,
            True,
            None,
            None,
            None,
        )

    def reset(self) -> None:
        """Puts the stream back to where it begins."""
        self._state["prefix"].copy_(self._memory.embedding)

    def step(self) -> torch.Tensor:
        """The last layer's output [B, hidden]; the routing is kept in `layer_ids`."""
        x, self.layer_ids = self._memory.delta, []
        for weights in self._layers:
            x = self.layer.layer(self._case.kind, weights, self._state, x)
            self.layer_ids.append(self.layer.last_ids)
        return x

    def one_layer(self, index: int, prefix: torch.Tensor, delta: torch.Tensor) -> dict[str, torch.Tensor]:
        """One layer on given inputs: its output, the new prefix, the experts chosen, and the KDA state."""
        self._state["prefix"].copy_(prefix)
        own = self._layers[index]
        out = self.layer.layer(self._case.kind, own, self._state, delta)
        found = {"out": out, "prefix": self._state["prefix"].clone(), "ids": self.layer.last_ids}
        if self._case.kind == "kda":
            found["state"] = own["state"].clone()
        return found
