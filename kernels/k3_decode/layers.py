"""K3's layers as a chain of fused ops: what a decode step runs between embedding and head.

A chain may be all of a model's layers, or a few of one rank's for a benchmark; `first_layer` places it in
AttnRes's schedule. Buffers are allocated once, for the most rows a step may have, and every op writes into
views of them, so that a step allocates nothing on a GPU and can be captured.

Layouts: `whole` keeps router and latent projections on every rank, as stock does; `sharded` divides them over
the ranks, which then exchange logits, latents and outputs: an op writes its columns into the buffer that
holds all ranks' columns, and the exchange fills in the others.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from k3_decode.bound_layers import BoundLayer, ChainOptions, bind_layer, share_of
from k3_decode.collectives import Exchange, gather, reduce
from k3_decode.collectives.meetings import Meetings, transpose
from k3_decode.model import SOFTMAX_SCALE
from k3_decode.op_table import Bound, OpTable
from k3_decode.ops.contract import LAUNCH_SLOTS
from k3_decode.ops.mla_attend import LSE_BASE
from k3_decode.ops.mla_query import KV_LORA
from k3_decode.overlap import Overlap
from k3_decode.rank_weights import LayerWeights
from k3_decode.residuals import Mix, before_attention, before_ffn
from k3_decode.shapes import RankShapes
from k3_decode.state import RankCaches, StepInputs
from k3_decode.step_buffers import Buffers, allocate, views_of

__all__ = ["LayerChain"]

IN_TURN = Overlap(shared="along", experts_sms=1, shared_sms=1, unserved="along")
"""Where nothing runs beside anything."""


class LayerChain:
    """Some consecutive layers of one rank over their weights and caches."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        shapes: RankShapes,
        caches: RankCaches,
        table: OpTable,
        options: ChainOptions,
    ) -> None:
        device = layers[0].attention_norm.device
        if options.context_ranks not in (1, shapes.tp):
            raise ValueError(
                f"a context divided over {options.context_ranks} of {shapes.tp} ranks; all of them divide it "
                f"or none does"
            )
        self._shapes, self._caches, self._table, self._options = shapes, caches, table, options
        self._layers = tuple(bind_layer(table, layer, shapes, options) for layer in layers)
        self._has_streams = device.type != "cpu"
        self._side = _side_stream(device) if device.type == "cuda" else None
        self._is_asking = False
        self.launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device)
        """Kernel launches by op since the last clearing, counted by the kernels."""
        self.buffers = allocate(shapes, table, options, device)
        """Every buffer of a step by name, at its most rows."""

    def views(self, rows: int) -> Buffers:
        """The buffers of a step of `rows` rows."""
        return views_of(self.buffers, rows)

    def forward(
        self,
        use: Buffers,
        prefix: torch.Tensor,
        spare: torch.Tensor,
        delta: torch.Tensor | None,
        step: StepInputs,
    ) -> Exchange:
        """The last layer's output, which `prefix` does not hold yet.

        `prefix` and `spare` [B, hidden] are the chain's to write; where an AttnRes block begins they change
        places, and `prefix_of` says which holds the stream in the end.
        """
        block, tp = self._shapes.model.attn_res_block or 0, self._shapes.tp
        for index, layer in enumerate(self._layers):
            place = self._options.first_layer + index
            self.mix(use, before_attention(place, block), prefix, delta, layer.attention_mix)
            yield from self._attend(use, index, layer, step)
            mix = before_ffn(place, block)
            self.run("projection", x=use["core"], out=spare, **layer.out_proj)
            self._ask_ahead(self._plan(len(spare)), "front", layer.front)
            attended = yield from reduce(spare, tp)
            if attended is not spare:
                spare.copy_(attended)
            if mix.restarts:
                prefix, spare = spare, prefix
            self.mix(use, mix, prefix, None if mix.restarts else spare, layer.ffn_mix)
            delta = yield from self._ffn(use, index, layer)
        self._join()
        assert delta is not None
        return delta

    def restarts(self) -> int:
        """How often `prefix` and `spare` change places in one pass."""
        block = self._shapes.model.attn_res_block or 0
        first = self._options.first_layer
        return sum(before_ffn(first + index, block).restarts for index in range(len(self._layers)))

    def constants(self) -> tuple[object, ...]:
        """Everything held beside the buffers: prepared weights and workspaces."""
        return (self._layers,)

    def mix(
        self,
        use: Buffers,
        mix: Mix,
        prefix: torch.Tensor,
        delta: torch.Tensor | None,
        constants: Bound,
    ) -> None:
        """AttnRes and norm: `x` from the stream."""
        self.run(
            "attn_res",
            prefix=prefix,
            delta=delta,
            blocks=use["blocks"],
            blocks_read=mix.blocks_read,
            write_index=mix.write_index,
            out=use["x"],
            eps=self._shapes.model.norm_eps,
            **constants,
        )

    def run(self, op: str, **arguments: Any) -> None:
        """One op of the table."""
        self._table[op].run(launches=self.launches, **arguments)

    def _attend(self, use: Buffers, index: int, layer: BoundLayer, step: StepInputs) -> Meetings:
        """Writes `core`, what the output projection takes; ranks that divide the context meet in it."""
        model = self._shapes.model
        if layer.kda is not None:
            memory = self._caches.kda[index]
            self.run("projection", x=use["x"], out=use["kda_packed"], **layer.in_proj)
            self.run(
                "kda_step",
                packed=use["kda_packed"],
                conv_state=memory.conv[:, : step.rows + 2],
                state=memory.recurrent,
                slots=step.slots,
                accepted=step.accepted,
                rows=step.rows,
                lower_bound=model.decay_lower_bound,
                out=use["core"],
                eps=model.norm_eps,
                **layer.kda,
            )
            return
        assert layer.query is not None
        assert layer.value is not None
        cache, scale = self._caches.mla[index], self._caches.kv_scale
        ranks, query = self._options.context_ranks, use["query"]
        self.run("projection", x=use["x"], out=use["mla_packed"], **layer.in_proj)
        self.run(
            "mla_query",
            packed=use["mla_packed"],
            cache=cache,
            slot_mapping=step.slot_mapping,
            query=query[:, share_of(query.shape[1], ranks, self._options.rank if ranks > 1 else 0)],
            kv_scale=scale,
            eps=model.norm_eps,
            **layer.query,
        )
        if ranks > 1:
            flat = query.flatten(1)
            mine = flat[:, share_of(flat.shape[1], ranks, self._options.rank)]
            query = (yield from gather(mine, ranks, flat)).view(query.shape)
        rows = len(query) // len(step.lengths)
        partial, partial_lse = self._partials(use, len(step.lengths), rows)
        is_split = partial.shape[0] > 1
        self.run(
            "mla_attend",
            query=query,
            cache=cache,
            block_table=step.block_table,
            lengths=step.lengths,
            rows=rows,
            scale=SOFTMAX_SCALE,
            kv_scale=scale,
            out=partial if is_split else partial[0],
            lse=partial_lse if is_split else partial_lse[0],
        )
        gate = use["mla_packed"][:, -self._shapes.channels :]
        yield from self._values(partial, partial_lse, gate, use["core"], layer.value)

    def _values(
        self, partial: torch.Tensor, lse: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, value: Bound
    ) -> Meetings:
        """Partials of this rank's share to gated values of its heads; splits and ranks are merged at once."""
        ranks, (splits, rows, heads) = self._options.context_ranks, lse.shape
        if ranks > 1:
            by_owner = (splits, rows, ranks, heads // ranks)
            partial = yield from transpose(partial.view(*by_owner, KV_LORA).movedim(2, 0), ranks)
            lse = yield from transpose(lse.view(by_owner).movedim(2, 0), ranks)
            partial, lse = partial.flatten(0, 1), lse.flatten(0, 1)
        self.run(
            "mla_value", partial=partial, partial_lse=lse, gate=gate, lse_base=LSE_BASE, out=out, **value
        )

    def _partials(self, use: Buffers, requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, B, H, 512] and fp32 [S, B, H] in as many splits of the context as the op wants."""
        heads, tokens = self._shapes.heads * self._options.context_ranks, requests * rows
        splits = self._table["mla_attend"].splits_of(requests, rows, heads)
        pairs = splits * tokens * heads
        return (
            use["mixed"][:pairs].view(splits, tokens, heads, KV_LORA),
            use["lse"][:pairs].view(splits, tokens, heads),
        )

    def _ffn(self, use: Buffers, index: int, layer: BoundLayer) -> Exchange:
        """The FFN's output, combined over ranks."""
        tp, slot = self._shapes.tp, index % self._options.exchange_slots
        out = use["ffn"][slot, 0]
        if layer.front is None:
            assert layer.mlp is not None
            self.run("situ_mlp", x=use["x"], out=out, **layer.mlp)
            return (yield from reduce(out, tp))
        assert layer.experts is not None
        assert layer.shared_down is not None
        assert layer.tail is not None
        logits, latent = use["logits"][slot, 0], use["latent"][slot, 0]
        plan = self._plan(len(use["x"]))
        first = None if layer.narrow is None else plan.first_narrow(self._shapes.shared_inter)
        is_aside = plan.shared == "aside"
        if first == 0:
            self._run_narrow(use, layer, first, plan)
        elif is_aside:
            assert layer.mlp is not None
            self._run_aside("situ_mlp", x=use["x"], out=use["shared"], **layer.mlp)
        front = dict(layer.front)
        if first:
            front["gate_up_weight"] = front["gate_up_weight"][: 2 * first]
        self.run(
            "moe_front",
            x=use["x"],
            logits=self._published(use["logits"][slot]),
            latent=self._published(use["latent"][slot]),
            hidden=None if is_aside or first == 0 else use["hidden"][:, :first],
            **front,
        )
        if first:
            self._run_narrow(use, layer, first, plan)
        logits = yield from self._exchanged(logits)
        latent = yield from self._exchanged(latent)
        selection = {"logits": logits, "bias": layer.bias, "scale": self._shapes.model.routed_scale}
        if len(logits) >= self._table["router"].from_rows:
            self.run("router", ids=use["ids"], weights=use["shares"], **selection)
            selection = {}
        if not is_aside and first is None:
            self.run("projection", x=use["hidden"], out=use["shared"], **layer.shared_down)
        self.run(
            "experts",
            latent=latent,
            ids=use["ids"],
            weights=use["shares"],
            out=use["routed"],
            **({"spared": plan.spared_sms} if self._has_streams else {}),
            **selection,
            **layer.experts,
        )
        self._ask_ahead(plan, "tail", layer.tail)
        routed = yield from reduce(use["routed"], tp)
        if (is_aside or first is not None) and self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        shared = yield from reduce(use["shared"], tp)
        self.run(
            "latent_tail",
            latent=routed,
            shared=self._own(shared),
            out=self._published(use["ffn"][slot]),
            eps=self._shapes.model.norm_eps,
            **layer.tail,
        )
        if index + 1 < len(self._layers):
            self._ask_ahead(plan, "in_proj", self._layers[index + 1].in_proj)
        return (yield from self._exchanged(out))

    def _plan(self, rows: int) -> Overlap:
        """How the pieces of a layer share the device in a step of `rows` rows; on a CPU they run in turn."""
        inter, has_narrow = self._shapes.shared_inter, "narrow_mlp" in self._table
        if not self._has_streams:
            return IN_TURN
        return self._options.schedule(inter, rows).served(has_narrow)

    def _ask_ahead(self, plan: Overlap, name: str, weights: Bound | None) -> None:
        """Asks for weights of a later kernel from the side stream, where ranks are about to meet."""
        left = plan.prefetch.get(name, 0) if self._shapes.tp > 1 and self._side is not None else 0
        if not left or weights is None:
            return
        self._is_asking = True
        for weight in weights.values():
            if isinstance(weight, torch.Tensor) and left and weight.is_contiguous():
                size = min(left, weight.numel() * weight.element_size() // 16 * 16)
                self._run_aside("prefetch", weight=weight, bytes_wanted=size)
                left -= size

    def _run_narrow(self, use: Buffers, layer: BoundLayer, first: int, plan: Overlap) -> None:
        """The shared expert from hidden value `first` on, on the multiprocessors left by the routed ones."""
        assert layer.narrow is not None
        self._run_aside(
            "narrow_mlp", x=use["x"], hidden=use["hidden"], out=use["shared"], first=first,
            blocks=plan.shared_sms, **layer.narrow,
        )  # fmt: skip

    def _join(self) -> None:
        """Waits for what was asked ahead, which a capture must not leave open."""
        if self._is_asking and self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
            self._is_asking = False

    def _run_aside(self, op: str, **arguments: Any) -> None:
        """One op on the side stream; tensors without values have none, and run it here."""
        if self._side is None:
            self.run(op, **arguments)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self.run(op, **arguments)

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """The columns that this rank computes."""
        if self._options.layout == "whole":
            return whole
        return whole[:, share_of(whole.shape[1], self._shapes.tp, self._options.rank)]

    def _published(self, places: torch.Tensor) -> torch.Tensor:
        """Where this rank's columns go: [B, columns], or with several copies [copies, B, columns]."""
        columns = slice(None)
        if self._options.layout == "sharded":
            columns = share_of(places.shape[2], self._shapes.tp, self._options.rank)
        return places[0, :, columns] if self._options.copies == 1 else places[:, :, columns]

    def _exchanged(self, whole: torch.Tensor) -> Exchange:
        """The buffer with all ranks' columns."""
        if self._options.layout == "whole":
            return whole
        combined = yield from gather(self._own(whole), self._shapes.tp, whole)
        return combined


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all chains of a device: those of several ranks in one process share the MLP's workspace."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]  # has no types
