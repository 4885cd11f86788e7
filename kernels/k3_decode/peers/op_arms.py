"""Single ops beside every way in which stock or another library runs them, over weights that leave L2.

Each builder below gives one op at one rank's shapes as calls, a set of weights (or states, or routings) each,
that write the same outputs: `optimised`, and a peer a name. Inputs that a step hands from op to op are drawn
once and stay. What is checked against float64 is our first call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from k3_decode.op_table import OpTable
from k3_decode.ops.mla_attend import LSE_BASE
from k3_decode.peers.layer_arms import Case, draw_layer
from k3_decode.peers.stock_layer import MLA_SCALE, StockLayer, common_state, kda_state, make_attn, mla_state
from k3_decode.shapes import RankShapes

__all__ = ["BUILDERS", "Bench", "OpArms"]

Call = Callable[[], torch.Tensor]
"""Puts one run of the op on the stream and gives its output."""
EPS = 1e-5
LATENT = 512


def each(function: Callable[[Any], torch.Tensor], sets: Sequence[Any]) -> list[Call]:
    """One call a set."""
    return [partial(function, item) for item in sets]


@dataclass(frozen=True, slots=True)
class Bench:
    """What builders draw from."""

    case: Case
    sets: int
    """Sets of weights that calls rotate over."""
    stock: StockLayer
    table: OpTable
    launches: torch.Tensor
    pool: torch.Tensor | None
    """KV pages, of MLA's attention alone."""
    humming: Any = None
    flashinfer: Any = None

    @property
    def shapes(self) -> RankShapes:
        return self.case.shapes

    @property
    def rows(self) -> int:
        return self.case.requests

    def normal(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        """bf16 normals."""
        return (torch.randn(size, device="cuda") * scale).to(torch.bfloat16)

    def weight(self, rows: int, width: int) -> torch.Tensor:
        """One weight at which products keep unit variance."""
        return self.normal(rows, width, scale=width**-0.5)

    def empty(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An output, NaN until it is written."""
        return torch.full(size, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device="cuda")

    def ours(self, op: str, weights: dict[str, Any], result: torch.Tensor, /, **arguments: Any) -> Call:
        """One prepared call of the fused op, which writes `result` among others."""
        bound = self.table[op].prepare(**weights) if weights else {}

        def call() -> torch.Tensor:
            self.table[op].run(launches=self.launches, **arguments, **bound)
            return result

        return call


@dataclass(frozen=True, slots=True)
class OpArms:
    """One op in all its ways."""

    op: str
    optimised: list[Call]
    peers: dict[str, list[Call]]
    moved_bytes: float
    """Weights once, states and cache rows, of one call."""
    first: dict[str, Any]
    """The op's arguments in the first set, states as they are before any call: what float64 is asked for."""
    output: str = "out"
    """The output that is compared."""
    experts: float = 0.0
    """Distinct experts of a call."""
    checked: Call | None = None
    """What is compared where it is not the first call."""


def _product(bench: Bench, rows: int, width: int, *, dtype: torch.dtype = torch.bfloat16) -> OpArms:
    """A projection; stock takes its own table's kernel or cuBLAS."""
    x = bench.normal(bench.rows, width)
    weights = [bench.weight(rows, width) for _ in range(bench.sets)]
    out = bench.empty(bench.rows, rows, dtype=dtype)
    stock = bench.stock
    return OpArms(
        "projection",
        [bench.ours("projection", {"weight": w}, out, x=x, out=out) for w in weights],
        {
            "vllm": each(lambda w: stock.lin(x, w), weights),
            "cublas": each(lambda w: functional.linear(x, w), weights),
        },
        2.0 * rows * width,
        {"x": x, "weight": weights[0], "out": out},
    )


def _kda_in(bench: Bench) -> OpArms:
    return _product(bench, bench.shapes.kda_in_rows, bench.shapes.model.hidden)


def _attention_out(bench: Bench) -> OpArms:
    return _product(bench, bench.shapes.model.hidden, bench.shapes.channels)


def _head(bench: Bench) -> OpArms:
    model = bench.shapes.model
    return _product(bench, model.vocab // bench.case.tp, model.hidden, dtype=torch.float32)


def _mla_in(bench: Bench) -> OpArms:
    """Stock multiplies latents and gate by two kernels on two streams, or cuBLAS by one."""
    arms = _product(bench, bench.shapes.mla_in_rows, bench.shapes.model.hidden)
    x = bench.normal(bench.rows, bench.shapes.model.hidden)
    stock, latents = bench.stock, bench.shapes.mla_in_rows - bench.shapes.channels
    weights = [bench.weight(bench.shapes.mla_in_rows, x.shape[1]) for _ in range(bench.sets)]

    def apart(w: torch.Tensor) -> torch.Tensor:
        found: tuple[torch.Tensor, torch.Tensor] = stock.parallel(
            lambda: stock.lin(x, w[:latents]), lambda: stock.lin(x, w[latents:]), *stock.ev[2:4], stock.aux
        )
        return found[0]

    peers = {"vllm": each(apart, weights), "cublas": arms.peers["cublas"]}
    return replace(arms, peers=peers)


def _attn_res(bench: Bench) -> OpArms:
    """Four finished blocks and the prefix; rows are warm in L2, as behind the op before."""
    rows, hidden, read = bench.rows, bench.shapes.model.hidden, 4
    states = [common_state(rows) for _ in range(bench.sets)]
    norm, score = bench.normal(hidden, scale=0.1) + 1.0, bench.normal(hidden, scale=0.02)
    layer = {"ar1": (torch.ones_like(norm), score, norm)}
    delta, out = bench.normal(rows, hidden, scale=1e-2), bench.empty(rows, hidden)
    first = {name: states[0][name].clone() for name in ("prefix", "blocks")}
    constants = {"score_weight": score.float(), "norm_weight": norm}

    def arguments(state: dict[str, Any]) -> dict[str, Any]:
        return {
            "prefix": state["prefix"], "delta": delta, "blocks": state["blocks"], "blocks_read": read,
            "write_index": -1, "out": out, "eps": EPS, **constants,
        }  # fmt: skip

    def ours(state: dict[str, Any]) -> Call:
        return bench.ours("attn_res", {}, out, **arguments(state))

    return OpArms(
        "attn_res",
        [ours(state) for state in states],
        {"vllm": each(lambda s: bench.stock.attn_res(s, delta, layer, "ar1"), states)},
        2.0 * rows * hidden * (read + 4),
        arguments(first),
    )


def _kda_step(bench: Bench) -> OpArms:
    """Stock and FlashInfer take the decay from a product of their own, which is in our kernel."""
    from k3_decode.peers.bench_extra import flashinfer_kda_core
    from k3_decode.peers.stock_layer import dims, make_attn_small

    rows, shapes, d = bench.rows, bench.shapes, dims(bench.case.tp)
    channels, heads, dim = shapes.channels, shapes.heads, shapes.model.head_dim
    layers = [make_attn_small(d) for _ in range(bench.sets)]
    for layer in layers:
        kda_state(d, rows, layer)
        layer["fb_w"] = bench.weight(channels, dim)
    packed, out = bench.normal(rows, shapes.kda_in_rows), bench.empty(rows, channels)
    mixed, gate, low, beta = packed[:, : 4 * channels + dim + heads].split(
        [3 * channels, channels, dim, heads], dim=-1
    )
    step = common_state(rows)
    slots = step["slots"].unsqueeze(1)
    first = {name: layers[0][name].clone() for name in ("state", "conv_state")}

    def arguments(layer: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
        return {
            "packed": packed, "conv_weight": layer["conv_wm"], "decay_weight": layer["fb_w"],
            "a_log": layer["A_log"], "dt_bias": layer["dt_bias"], "norm_weight": layer["onorm_f"],
            "conv_state": memory["conv_state"], "state": memory["state"], "slots": slots, "accepted": None,
            "rows": 1, "lower_bound": shapes.model.decay_lower_bound, "out": out, "eps": EPS,
        }  # fmt: skip

    def native(layer: dict[str, Any]) -> torch.Tensor:
        decay = bench.stock.lin(low, layer["fb_w"])
        found: torch.Tensor = bench.stock.kda_core(mixed, gate, decay, beta, layer, step)
        return found

    def flashinfer(layer: dict[str, Any]) -> torch.Tensor:
        decay = bench.stock.lin(low, layer["fb_w"])
        return flashinfer_kda_core(bench.flashinfer, mixed, gate, decay, beta, layer, step)

    peers = {"vllm": each(native, layers)}
    if bench.flashinfer is not None:
        peers["flashinfer"] = each(flashinfer, layers)
    state_bytes = rows * (8.0 * heads * dim * dim + 36.0 * channels)
    return OpArms(
        "kda_step",
        [bench.ours("kda_step", {}, out, **arguments(layer, layer)) for layer in layers],
        peers,
        state_bytes + 2.0 * channels * dim,
        arguments(layers[0], first),
    )


def _moe_front(bench: Bench) -> OpArms:
    """Router, latent down and the shared expert's gate and up with SiTU, all rows on a rank as in stock."""
    rows, shapes, model = bench.rows, bench.shapes, bench.shapes.model
    x, stock = bench.normal(rows, model.hidden), bench.stock
    sets = [
        {
            "router_weight": bench.weight(model.experts, model.hidden),
            "down_weight": bench.weight(model.latent, model.hidden),
            "gate_up_weight": bench.weight(2 * shapes.shared_inter, model.hidden),
        }
        for _ in range(bench.sets)
    ]
    outs = {
        "logits": bench.empty(rows, model.experts, dtype=torch.float32),
        "latent": bench.empty(rows, model.latent),
        "hidden": bench.empty(rows, shapes.shared_inter),
    }

    def vllm(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        _, latent = stock.parallel(
            lambda: stock.router(x, {"r_w": weights["router_weight"]}),
            lambda: stock.lin(x, weights["down_weight"]), *stock.ev[4:6], stock.aux,
        )  # fmt: skip
        both = stock.lin(x, weights["gate_up_weight"])
        torch.ops._C.situ_and_mul(outs["hidden"], both, 4.0, 25.0)
        return latent

    size = 2.0 * model.hidden * (model.experts + model.latent + 2 * shapes.shared_inter)
    return OpArms(
        "moe_front",
        [bench.ours("moe_front", w, outs["latent"], x=x, **outs) for w in sets],
        {"vllm": each(vllm, sets)},
        size,
        {"x": x, **sets[0], **outs},
        output="latent",
    )


def _router(bench: Bench) -> OpArms:
    """Stock's grouped top-k; scores differ by more than any rounding."""
    rows, model = bench.rows, bench.shapes.model
    logits = [torch.randn(rows, model.experts, device="cuda") for _ in range(bench.sets)]
    bias = torch.randn(model.experts, device="cuda") * 0.01
    ids = bench.empty(rows, model.top_k, dtype=torch.int32)
    weights = bench.empty(rows, model.top_k, dtype=torch.float32)

    def arguments(found: torch.Tensor) -> dict[str, Any]:
        return {"logits": found, "bias": bias, "ids": ids, "weights": weights, "scale": model.routed_scale}

    return OpArms(
        "router",
        [bench.ours("router", {}, weights, **arguments(found)) for found in logits],
        {"vllm": each(lambda x: bench.stock.topk(x, {"r_bias": bias})[0], logits)},
        4.0 * rows * model.experts,
        arguments(logits[0]),
        output="weights",
    )


@lru_cache(maxsize=1)
def _expert_weights(tp: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One layer's experts as they are and in Marlin's tiles, for every cell of a TP."""
    from k3_decode.peers.stock_arm import marlin_weights

    layer = draw_layer("kda", Case("kda", tp, 1).shapes, torch.Generator("cuda").manual_seed(11))
    names = ("w13", "w13_scale", "w2", "w2_scale")
    return {name: getattr(layer.ffn, name) for name in names}, marlin_weights(layer)


def _experts(bench: Bench) -> OpArms:
    """One layer's experts under many routings, uniform as a trained router's are not."""
    rows, model = bench.rows, bench.shapes.model
    ours, marlin = _expert_weights(bench.case.tp)
    latent, out = bench.normal(rows, model.latent), bench.empty(rows, model.latent)
    chosen = [
        torch.rand(rows, model.experts, device="cuda")
        .argsort(1)[:, : model.top_k]
        .to(torch.int32)
        .contiguous()
        for _ in range(bench.sets)
    ]
    shares = torch.rand(rows, model.top_k, device="cuda") + 0.05
    shares = shares / shares.sum(1, keepdim=True)
    bound = bench.table["experts"].prepare(**ours)

    def mine(ids: torch.Tensor) -> Call:
        def call() -> torch.Tensor:
            bench.table["experts"].run(
                launches=bench.launches, latent=latent, ids=ids, weights=shares, out=out, **bound
            )
            return out

        return call

    peers = {"marlin": each(lambda ids: bench.stock.experts(latent, shares, ids, marlin), chosen)}
    if bench.humming is not None:
        humming = bench.humming.weights()
        peers["humming"] = each(lambda ids: bench.humming.experts(latent, shares, ids, humming), chosen)
    distinct = sum(ids.unique().numel() for ids in chosen) / len(chosen)
    size = distinct * 3 * bench.shapes.expert_width * model.latent * (0.5 + 1 / 32)
    return OpArms(
        "experts",
        [mine(ids) for ids in chosen],
        peers,
        size,
        {"latent": latent, "ids": chosen[0], "weights": shares, "out": out, **ours},
        experts=distinct,
    )


def _situ_mlp(bench: Bench) -> OpArms:
    rows, shapes, hidden = bench.rows, bench.shapes, bench.shapes.model.hidden
    x, out = bench.normal(rows, hidden), bench.empty(rows, hidden)
    sets = [
        {
            "gate_up_weight": bench.weight(2 * shapes.shared_inter, hidden),
            "down_weight": bench.weight(hidden, shapes.shared_inter),
        }
        for _ in range(bench.sets)
    ]
    named = [{"sgu_w": w["gate_up_weight"], "sd_w": w["down_weight"]} for w in sets]
    return OpArms(
        "situ_mlp",
        [bench.ours("situ_mlp", w, out, x=x, out=out) for w in sets],
        {"vllm": each(lambda w: bench.stock.shared(x, w), named)},
        6.0 * shapes.shared_inter * hidden,
        {"x": x, **sets[0], "out": out},
    )


def _latent_tail(bench: Bench) -> OpArms:
    """Norm, the whole up-projection and the shared expert's sum."""
    rows, model = bench.rows, bench.shapes.model
    latent, shared = bench.normal(rows, model.latent), bench.normal(rows, model.hidden)
    norm, out = bench.normal(model.latent, scale=0.1) + 1.0, bench.empty(rows, model.hidden)
    weights = [bench.weight(model.hidden, model.latent) for _ in range(bench.sets)]

    def arguments(weight: torch.Tensor) -> dict[str, Any]:
        return {"latent": latent, "norm_weight": norm, "up_weight": weight, "shared": shared, "out": out}

    return OpArms(
        "latent_tail",
        [bench.ours("latent_tail", {}, out, **arguments(w), eps=EPS) for w in weights],
        {"vllm": each(lambda w: bench.stock.tail(latent, shared, {"ln": norm, "up_w": w}), weights)},
        2.0 * model.hidden * model.latent,
        {**arguments(weights[0]), "eps": EPS},
    )


def _mla_query(bench: Bench) -> OpArms:
    """Norms, q_b, W_UK, and this step's cache rows."""
    from k3_decode.peers.stock_layer import dims

    rows, shapes, model = bench.rows, bench.shapes, bench.shapes.model
    heads, stock, rank = shapes.heads, bench.stock, model.q_lora or 0
    assert bench.pool is not None
    packed = bench.normal(rows, shapes.mla_in_rows)
    layers = [make_attn(dims(bench.case.tp), "mla") for _ in range(bench.sets)]
    mla_state(dims(bench.case.tp), rows, 1024, bench.pool, layers)
    query = bench.empty(rows, heads, LATENT + 64)
    mine = [{"q_norm": w["qn"], "q_weight": w["qb_w"], "uk_weight": w["W_UK_T"].contiguous()} for w in layers]

    def rest(layer: dict[str, Any]) -> dict[str, Any]:
        return {
            "packed": packed, "kv_norm": layer["kvn"], "cache": bench.pool, "kv_scale": 1.0, "eps": EPS,
            "slot_mapping": layer["slotmap"].long(), "query": query,
        }  # fmt: skip

    def vllm(layer: dict[str, Any]) -> torch.Tensor:
        low, kv, position = packed[:, : rank + LATENT + 64].split([rank, LATENT, 64], dim=-1)
        normed, latent = stock.q_kv_norm(low, kv, layer)
        whole = stock.lin(normed, layer["qb_w"]).view(rows, heads, 192)
        nope, rope = whole.split([128, 64], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), layer["W_UK_T"]).transpose(0, 1)
        found: torch.Tensor = stock.concat_insert(absorbed, rope, latent, position, bench.pool, layer)
        return found

    return OpArms(
        "mla_query",
        [bench.ours("mla_query", w, query, **rest(layer)) for w, layer in zip(mine, layers, strict=True)],
        {"vllm": each(vllm, layers)},
        2.0 * heads * (192 * rank + 128 * LATENT),
        {**mine[0], **rest(layers[0])},
        output="query",
    )


def _mla_attend(bench: Bench) -> OpArms:
    """The attention's core; ours leaves the sum of its splits to `mla_value`, stock adds them up itself."""
    from k3_decode.peers.flash_attention import fa3_mla, make_schedule
    from k3_decode.peers.stock_layer import dims

    rows, heads, context = bench.rows, bench.shapes.heads, bench.case.context
    pool = bench.pool
    assert pool is not None
    layers: list[dict[str, Any]] = [{} for _ in range(bench.sets)]
    state = mla_state(dims(bench.case.tp), rows, context, bench.pool, layers)
    query = bench.normal(rows, heads, LATENT + 64)
    splits = bench.table["mla_attend"].splits_of(rows, 1, heads)
    out = bench.empty(splits, rows, heads, LATENT)
    lse = bench.empty(splits, rows, heads, dtype=torch.float32)
    lengths = state["seqlens"]
    schedule = make_schedule(lengths, context, heads)

    def arguments(layer: dict[str, Any]) -> dict[str, Any]:
        return {
            "query": query, "cache": bench.pool, "block_table": layer["btab"], "lengths": lengths, "rows": 1,
            "scale": MLA_SCALE, "kv_scale": 1.0,
        }  # fmt: skip

    def ours(layer: dict[str, Any], parts: int) -> Call:
        places = {"out": out if parts > 1 else out[0], "lse": lse if parts > 1 else lse[0]}

        def call() -> torch.Tensor:
            bench.table["mla_attend"].run(launches=bench.launches, **arguments(layer), **places)
            return places["out"]

        return call

    return OpArms(
        "mla_attend",
        [ours(layer, splits) for layer in layers],
        {
            "flashmla": each(lambda layer: bench.stock.flashmla(query.unsqueeze(1), layer, state), layers),
            "fa3": each(lambda layer: fa3_mla(query, pool, layer["btab"], schedule, MLA_SCALE), layers),
        },
        2.0 * rows * context * (LATENT + 64),
        {**arguments(layers[0]), "out": out[0], "lse": lse[0]},
        checked=ours(layers[0], 1),
    )


def _mla_value(bench: Bench) -> OpArms:
    """W_UV and gate; ours also adds up the attention's splits."""
    rows, heads, channels = bench.rows, bench.shapes.heads, bench.shapes.channels
    splits = bench.table["mla_attend"].splits_of(rows, 1, heads)
    partial, lse = bench.normal(splits, rows, heads, LATENT), torch.randn(splits, rows, heads, device="cuda")
    gate, out = bench.normal(rows, channels), bench.empty(rows, channels)
    weights = [bench.normal(heads, LATENT, 128, scale=LATENT**-0.5) for _ in range(bench.sets)]
    mixed = bench.empty(rows, channels)

    def vllm(weight: torch.Tensor) -> torch.Tensor:
        lines = mixed.view(rows, heads, 128).transpose(0, 1)
        torch.bmm(partial[0].transpose(0, 1), weight, out=lines)
        found: torch.Tensor = bench.stock.gate_mul(mixed, gate)
        return found

    def rest() -> dict[str, Any]:
        return {"partial": partial, "partial_lse": lse, "gate": gate, "lse_base": LSE_BASE, "out": out}

    return OpArms(
        "mla_value",
        [bench.ours("mla_value", {"uv_weight": w}, out, **rest()) for w in weights],
        {"vllm": each(vllm, weights)},
        2.0 * heads * LATENT * (128 + splits * rows),
        {**rest(), "uv_weight": weights[0]},
    )


BUILDERS: dict[str, Callable[[Bench], OpArms]] = {
    "attn_res": _attn_res,
    "kda_in": _kda_in,
    "kda_step": _kda_step,
    "mla_in": _mla_in,
    "mla_query": _mla_query,
    "mla_attend": _mla_attend,
    "mla_value": _mla_value,
    "attention_out": _attention_out,
    "moe_front": _moe_front,
    "router": _router,
    "experts": _experts,
    "situ_mlp": _situ_mlp,
    "latent_tail": _latent_tail,
    "head": _head,
}
"""By the kind's name behind `op.`."""
