"""Layers of one rank among GPUs whose attention ends in the fused exchange: the output projection sends its
rows to the peers, and the residual's kernel adds, mixes and norms what arrives.

The rest meets through `Exchanged`, over the same group, in the same order on every rank. Bits are those of
projection, rank-ordered sum and AttnRes.
"""

from collections.abc import Sequence

import torch

from k3_decode.bound_layers import ChainOptions
from k3_decode.collectives.exchanged import TWO_STAGE_ROWS
from k3_decode.collectives.groups import ExchangeGroup
from k3_decode.collectives.meetings import Exchange, Meetings
from k3_decode.cute.attn_res_allreduce import attn_res_allreduce
from k3_decode.cute.mla_send import mla_send
from k3_decode.cute.mla_value_received import mla_value_received
from k3_decode.cute.oproj_allreduce import oproj_allreduce
from k3_decode.layers import LayerChain
from k3_decode.op_table import Bound, OpTable
from k3_decode.ops.mla_attend import LSE_BASE
from k3_decode.rank_weights import LayerWeights
from k3_decode.residuals import before_attention, before_ffn
from k3_decode.shapes import RankShapes
from k3_decode.state import RankCaches, StepInputs
from k3_decode.step_buffers import Buffers

__all__ = ["FusedChain"]


class FusedChain(LayerChain):
    """A `LayerChain` over a group of exchanges; `prefix` stays where it is when an AttnRes block begins."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        shapes: RankShapes,
        caches: RankCaches,
        table: OpTable,
        options: ChainOptions,
        group: ExchangeGroup,
    ) -> None:
        super().__init__(layers, shapes, caches, table, options)
        self._group = group

    def forward(
        self,
        use: Buffers,
        prefix: torch.Tensor,
        spare: torch.Tensor,
        delta: torch.Tensor | None,
        step: StepInputs,
    ) -> Exchange:
        """The last layer's output, which `prefix` does not hold yet; `spare` is not used."""
        block, ranks = self._shapes.model.attn_res_block or 0, self._group.layout.ranks
        is_two_stage = ranks > 2 and len(prefix) >= TWO_STAGE_ROWS
        for index, layer in enumerate(self._layers):
            place = self._options.first_layer + index
            self.mix(use, before_attention(place, block), prefix, delta, layer.attention_mix)
            yield from self._attend(use, index, layer, step)
            oproj_allreduce(
                x=use["core"], launches=self.launches, is_two_stage=is_two_stage, **layer.out_proj,
                **self._group.arguments(),
            )  # fmt: skip
            self._ask_ahead(self._plan(len(prefix)), "front", layer.front)
            mix = before_ffn(place, block)
            attn_res_allreduce(
                part=None, prefix=prefix[None], blocks=use["blocks"][None], blocks_read=mix.blocks_read,
                write_index=mix.write_index, out=use["x"][None], eps=self._shapes.model.norm_eps,
                launches=self.launches, is_two_stage=is_two_stage, restarts=mix.restarts, **layer.ffn_mix,
                **self._group.arguments(),
            )  # fmt: skip
            delta = yield from self._ffn(use, index, layer)
        self._join()
        assert delta is not None
        return delta

    def _values(
        self, partial: torch.Tensor, lse: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, value: Bound
    ) -> Meetings:
        """As in `LayerChain`, by kernels that send what they merge and merge what arrives."""
        if self._options.context_ranks == 1:
            yield from super()._values(partial, lse, gate, out, value)
            return
        group = self._group.arguments()
        mla_send(
            partial=partial[None], partial_lse=lse[None], lse_base=LSE_BASE, launches=self.launches, **group
        )
        mla_value_received(
            uv_weight=value["uv_weight"][None], gate=gate[None], lse_base=LSE_BASE, out=out[None],
            launches=self.launches, **group,
        )  # fmt: skip

    def restarts(self) -> int:
        """Never: the sum takes the prefix's place."""
        return 0
