"""The two arms of a layer benchmark: the same layers of one rank, run by the fused ops and by stock.

Both arms hold the same weights: what stock wants in a layout of its own (Marlin's expert tiles) is repacked
from the same MXFP4 codes. States and KV rows start equal. Humming's expert weights alone are random bits in
its transformed layout, as its transform takes seconds a layer; they are for timing.
"""

from dataclasses import dataclass
from typing import Any

import torch

from k3_decode.bound_layers import ChainOptions
from k3_decode.collectives import run_alone
from k3_decode.layers import LayerChain
from k3_decode.op_table import OpTable
from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.rank_weights import KdaWeights, LayerWeights, MlaWeights, MoeWeights
from k3_decode.shapes import K3, RankShapes
from k3_decode.state import KdaState, RankCaches, StepInputs

__all__ = ["FIRST_LAYER", "Case", "Memory", "OptimisedArm", "draw_layer", "make_memory"]

FIRST_LAYER = 37
"""Layers 37 to 47 read four finished AttnRes blocks and begin none: the middle of the model."""
KV_ROW = 576


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the benchmark."""

    kind: str
    """`kda` or `mla`."""
    tp: int
    requests: int
    context: int = 0
    """Tokens in each request's cache, the step's own included; 0 for KDA."""

    @property
    def shapes(self) -> RankShapes:
        """The rank's sizes."""
        return K3.rank(self.tp)


def draw_layer(kind: str, shapes: RankShapes, generator: torch.Generator) -> LayerWeights:
    """One layer's weights on the generator's device, at scales that keep activations near one."""
    device, model, heads, channels = generator.device, shapes.model, shapes.heads, shapes.channels
    hidden, latent, inter = model.hidden, model.latent, shapes.expert_inter

    def normal(*size: int, scale: float | None = None) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return (drawn * (size[-1] ** -0.5 if scale is None else scale)).to(torch.bfloat16)

    def near_one(*size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator, device=device) + 0.5).to(torch.bfloat16)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)

    def scales(low: int, *size: int) -> torch.Tensor:
        return torch.randint(low, low + 4, size, generator=generator, device=device, dtype=torch.uint8)

    def score() -> torch.Tensor:
        return normal(hidden, scale=0.02).float()

    w13, w2 = codes(model.experts, 2 * inter, latent // 2), codes(model.experts, latent, inter // 2)
    width = shapes.expert_width
    w13.view(model.experts, 2, inter, latent // 2)[:, :, width:] = 0
    w2[..., width // 2 :] = 0

    attention: KdaWeights | MlaWeights
    if kind == "kda":
        used = 4 * channels + model.head_dim + heads
        in_proj = normal(shapes.kda_in_rows, hidden)
        in_proj[used:] = 0
        attention = KdaWeights(
            in_proj=in_proj,
            gate_b=None,
            conv_weight=normal(3, model.conv_width, channels, scale=0.5).float(),
            decay_weight=normal(channels, model.head_dim),
            a_log=torch.rand(heads, generator=generator, device=device),
            dt_bias=normal(channels, scale=0.1).float(),
            norm_weight=near_one(model.head_dim).float(),
            out_proj=normal(hidden, channels),
        )
    else:
        rank, width = model.q_lora or 0, model.qk_nope + model.qk_rope
        attention = MlaWeights(
            in_proj=normal(shapes.mla_in_rows, hidden),
            q_norm=near_one(rank),
            q_weight=normal(heads * width, rank),
            kv_norm=near_one(model.kv_lora),
            uk_weight=normal(heads, model.qk_nope, model.kv_lora),
            uv_weight=normal(heads, model.kv_lora, model.v_dim, scale=model.kv_lora**-0.5),
            out_proj=normal(hidden, channels),
        )
    return LayerWeights(
        attention_score=score(),
        attention_norm=near_one(hidden),
        attention=attention,
        ffn_score=score(),
        ffn_norm=near_one(hidden),
        ffn=MoeWeights(
            router_weight=normal(model.experts, hidden),
            router_bias=normal(model.experts, scale=0.01).float(),
            down_weight=normal(latent, hidden),
            w13=w13,
            w13_scale=scales(117, model.experts, 2 * inter, latent // 32),
            w2=w2,
            w2_scale=scales(119, model.experts, latent, inter // 32),
            latent_norm=near_one(latent),
            up_weight=normal(hidden, latent),
            shared_gate_up=normal(2 * shapes.shared_inter, hidden),
            shared_down=normal(hidden, shapes.shared_inter),
        ),
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What one arm's layers remember, and the step that reads it."""

    caches: RankCaches
    step: StepInputs
    blocks: torch.Tensor
    """bf16 [B, blocks, hidden]: finished AttnRes blocks."""
    embedding: torch.Tensor
    """bf16 [B, hidden]: the stream's prefix before the first layer."""
    delta: torch.Tensor
    """bf16 [B, hidden]: output of the layer before the first."""
    first_pages: tuple[int, ...]
    """Of the pool, by layer: where its own pages begin (page 0 of each is null)."""


def make_memory(case: Case, layers: int, pool: torch.Tensor | None, generator: torch.Generator) -> Memory:
    """Equal for equal generators. MLA layers take distinct pages of `pool` [pages, 64, 576] where it is
    large enough; page order is random."""
    device, shapes, model, requests = generator.device, case.shapes, case.shapes.model, case.requests

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device) * scale

    caches = RankCaches({}, {})
    pages = -(-case.context // PAGE_SIZE)
    table = torch.zeros(requests, max(1, pages), dtype=torch.int32, device=device)
    mapping = torch.full((requests,), -1, dtype=torch.int64, device=device)
    starts = [0] * layers
    if case.kind == "kda":
        for layer in range(layers):
            conv = normal(requests + 1, model.conv_width - 1, 3 * shapes.channels).to(torch.bfloat16)
            state = normal(requests + 1, shapes.heads, model.head_dim, model.head_dim, scale=0.1)
            caches.kda[layer] = KdaState(conv, state)
    else:
        assert pool is not None
        need = requests * pages
        order = torch.randperm(need, generator=generator, device=device) + 1
        table = order.view(requests, pages).to(torch.int32)
        mapping = table[:, -1].long() * PAGE_SIZE + (case.context - 1) % PAGE_SIZE
        room = pool.shape[0] - need - 1
        starts = [layer * need % max(1, room) for layer in range(layers)]
        for layer, start in enumerate(starts):
            caches.mla[layer] = pool[start : start + need + 1]
    slots = torch.arange(1, requests + 1, dtype=torch.int32, device=device).unsqueeze(1)
    step = StepInputs(
        requests=requests,
        rows=1,
        slots=slots,
        accepted=None,
        slot_mapping=mapping,
        block_table=table,
        lengths=torch.full((requests,), case.context, dtype=torch.int32, device=device),
        context_min=case.context,
        context_max=case.context,
    )
    return Memory(
        caches=caches,
        step=step,
        blocks=normal(requests, model.attn_res_blocks, model.hidden).to(torch.bfloat16),
        embedding=normal(requests, model.hidden).to(torch.bfloat16),
        delta=normal(requests, model.hidden).to(torch.bfloat16),
        first_pages=tuple(starts),
    )


class OptimisedArm:
    """The layers through fused ops."""

    def __init__(
        self, layers: list[LayerWeights], case: Case, memory: Memory, table: OpTable, **options: Any
    ) -> None:
        is_sharded = options.get("layout") == "sharded"
        chosen = ChainOptions(
            max_rows=case.requests,
            first_layer=FIRST_LAYER,
            exchange_slots=len(layers),
            copies=case.tp if is_sharded and memory.embedding.device.type != "cpu" else 1,
            **options,
        )
        self.chain = LayerChain(layers, case.shapes, memory.caches, table, chosen)
        self._memory = memory
        self._use = self.chain.views(case.requests)
        self._use["blocks"].copy_(memory.blocks)
        self.reset()

    def reset(self) -> None:
        """Puts the stream back to where it begins."""
        self._use["prefix_a"].copy_(self._memory.embedding)

    def step(self) -> torch.Tensor:
        """The last layer's output [B, hidden]."""
        use = self._use
        exchange = self.chain.forward(
            use, use["prefix_a"], use["prefix_b"], self._memory.delta, self._memory.step
        )
        return run_alone(exchange)

    def fill_peers(self, other: "OptimisedArm") -> None:
        """Takes what an arm of the layout `whole` computed as the peers' parts of every exchange."""
        for name in ("logits", "latent", "ffn"):
            self.chain.buffers[name].copy_(other.chain.buffers[name][:, :1])

    def buffer(self, name: str) -> torch.Tensor:
        """One of the step's buffers, at the case's rows."""
        return self._use[name]
