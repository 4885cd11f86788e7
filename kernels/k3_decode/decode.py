"""The optimised step: K3's decode and verify rows through fused ops and nothing else.

The same composition runs on every implementation of `op_table.py`. The layers are `layers.py`'s; this module
adds the embedding, whose rows are gathered by torch, and the head. Ranks meet through `collectives/`.
"""

from typing import TYPE_CHECKING

import torch

from k3_decode.bound_layers import ChainOptions, Layout
from k3_decode.collectives import Exchange, gather
from k3_decode.layers import LayerChain
from k3_decode.op_table import Bound, OpTable
from k3_decode.rank_weights import ModelWeights
from k3_decode.residuals import before_head
from k3_decode.shapes import K3Shapes
from k3_decode.state import RankCaches, StepInputs
from k3_decode.step_buffers import Buffers

if TYPE_CHECKING:
    from k3_decode.collectives.groups import ExchangeGroup

__all__ = ["OptimisedStep", "calls_of_a_step", "is_supported"]


EXCHANGE_SLOTS = 2
"""A rank that is a layer ahead writes where nobody still reads."""


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


def calls_of_a_step(model: K3Shapes, *, is_aside: bool = False) -> dict[str, int]:
    """How often one step calls each op; `is_aside`: its shared experts run on a stream of their own."""
    mla = sum(model.is_mla(layer) for layer in range(model.layers))
    moe = model.layers - 1
    return {
        "attn_res": 2 * model.layers + 1,
        "projection": 2 * model.layers + 1 + (0 if is_aside else moe),
        "kda_step": model.layers - mla,
        "moe_front": moe,
        "router": moe,
        "experts": moe,
        "situ_mlp": 1 + (moe if is_aside else 0),
        "latent_tail": moe,
        "mla_query": mla,
        "mla_attend": mla,
        "mla_value": mla,
    }


class OptimisedStep:
    """One rank's optimised decode over its weights and caches."""

    def __init__(
        self,
        weights: ModelWeights,
        caches: RankCaches,
        table: OpTable,
        max_rows: int,
        layout: Layout = "whole",
        group: "ExchangeGroup | None" = None,
        context_ranks: int = 1,
    ) -> None:
        model = weights.shapes.model
        if not is_supported(model):
            raise ValueError(f"the fused ops do not cover {model.name}; only the stock path runs it")
        self._weights, self._model = weights, model
        options = ChainOptions(
            max_rows=max_rows, rank=weights.rank, layout=layout, exchange_slots=EXCHANGE_SLOTS,
            context_ranks=context_ranks,
        )  # fmt: skip
        self._chain = _chain_of(weights, caches, table, options, group)
        self._final_mix: Bound = {"score_weight": weights.final_score, "norm_weight": weights.final_norm}
        self._head = table["projection"].prepare(weight=weights.head)
        size, device = (max_rows, weights.head.shape[0]), weights.embedding.device
        self._logits = torch.zeros(size, dtype=torch.float32, device=device)

    @property
    def launches(self) -> torch.Tensor:
        """Kernel launches by op since the last clearing, counted by the kernels."""
        return self._chain.launches

    @property
    def buffers(self) -> Buffers:
        """Every buffer of a step by name, at its most rows."""
        return {**self._chain.buffers, "vocab": self._logits}

    def forward(self, tokens: torch.Tensor, step: StepInputs) -> Exchange:
        """fp32 logits [B, vocab]; they are overwritten by the next step."""
        model, chain = self._model, self._chain
        use, logits = chain.views(tokens.shape[0]), self._logits[: tokens.shape[0]]
        prefix, spare = use["prefix_a"], use["prefix_b"]
        torch.index_select(self._weights.embedding, 0, tokens, out=prefix)
        delta = yield from chain.forward(use, prefix, spare, None, step)
        if chain.restarts() % 2:
            prefix = spare
        chain.mix(use, before_head(model.layers, model.attn_res_block or 0), prefix, delta, self._final_mix)
        chain.run("projection", x=use["x"], out=logits, **self._head)
        return (yield from gather(logits, self._weights.shapes.tp))

    def constants(self) -> tuple[object, ...]:
        """Everything held beside the buffers: prepared weights and workspaces."""
        return (self._chain.constants(), self._final_mix, self._head)


def _chain_of(
    weights: ModelWeights,
    caches: RankCaches,
    table: OpTable,
    options: ChainOptions,
    group: "ExchangeGroup | None",
) -> LayerChain:
    """The layers, whose attention ends in the fused exchange where real ranks have mailboxes."""
    if group is None:
        return LayerChain(weights.layers, weights.shapes, caches, table, options)
    from k3_decode.fused_chain import FusedChain

    return FusedChain(weights.layers, weights.shapes, caches, table, options, group)
