"""Teacher-forced replay of the canary through the decode path's formulas, with one part open to a fault.

Right tokens first at every step of a teacher-forced replay is the same as an exact greedy generation, since
both are identical up to the first error. So one replay gives exact match, margins and log-probability drift
at once, layer by layer over all positions, where only the KDA recurrence has to go token by token.

Rounds to bf16 where the stock decode path does; arithmetic is fp32. Independent of `model.py`; a test holds
the two together. `Path` is the decode path part by part: `faults.py` overrides one part each, `BENIGN`
holds roundings that a right kernel may choose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as nnf

from k3_decode.canary.export import mxfp4_unpacked
from k3_decode.ops.mla_query import FP8_KV_SCALE, to_cache
from k3_decode.shapes import K3Shapes

__all__ = ["BENIGN", "Caches", "Model", "Path", "Roundings", "advance", "load_model", "rounded"]

_KEPT_STATES = 5
"""States and conv inputs kept from before a seam, for faults that read a stale one."""


@dataclass(frozen=True, slots=True)
class Roundings:
    """Free choices of a right kernel; the defaults are the stock path's."""

    conv_to_bf16: bool = True
    router_to_bf16: bool = False
    latent_to_bf16: bool = True
    """Attention's latent output before W_UV."""
    expert_hidden_to_bf16: bool = True
    experts_to_bf16: bool = False
    """Each expert's output rounded before the weighted sum."""
    shares_to_bf16: bool = True
    """Attention's exp(score - largest) before it meets the values."""


BENIGN: dict[str, Roundings] = {
    "fp32 conv output": Roundings(conv_to_bf16=False),
    "bf16 router weights": Roundings(router_to_bf16=True),
    "fp32 hidden and latent": Roundings(latent_to_bf16=False, expert_hidden_to_bf16=False),
    "fp32 attention weights": Roundings(shares_to_bf16=False),
    "all of them, experts rounded one by one": Roundings(False, True, False, False, True, False),
}
"""Right kernels that round elsewhere: what a measure must not call a fault."""


@dataclass(frozen=True, slots=True)
class Model:
    """A canary's weights by checkpoint name, fp32, experts unpacked."""

    shapes: K3Shapes
    tensors: Mapping[str, Tensor]

    def layer(self, index: int) -> "Weights":
        """Weights of one layer."""
        return Weights(self.tensors, f"model.layers.{index}.")


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors under a prefix."""

    tensors: Mapping[str, Tensor]
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]


@dataclass(slots=True)
class Caches:
    """What one batch of requests has left behind: per layer KV rows, recurrent state, conv inputs."""

    position: int = 0
    """Tokens taken in."""
    rows: dict[int, Tensor] = field(default_factory=dict)
    """MLA layers: [B, T, 576], bf16 values."""
    states: dict[int, list[Tensor]] = field(default_factory=dict)
    """KDA layers: [B*H, V, K] after the last token, the one before it, ..."""
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """KDA layers: raw conv inputs [B, up to 8, 3C], the newest last."""
    kv_dtype: str = "bf16"
    """`fp8`: rows hold what an e4m3 cache with the pack's scale gives back."""

    def copy(self) -> "Caches":
        """Shares tensors, which are never written in place."""
        return Caches(self.position, dict(self.rows), dict(self.states), dict(self.inputs), self.kv_dtype)


class Path:
    """The decode path. Each method is one part; `magnitude` is a fault's size.

    `generator` gives the same draws in every run.
    """

    def __init__(self, magnitude: float = 0.0, roundings: Roundings | None = None) -> None:
        self.magnitude = magnitude
        self.roundings = roundings or Roundings()
        self.generator = torch.Generator().manual_seed(7)
        self.seam: int | None = None
        """Position of the first generated step; None: no seam in what is replayed."""
        self.position = 0
        """Position at which the block in hand starts."""

    @property
    def is_at_seam(self) -> bool:
        """Whether the block in hand is the first one after the seam."""
        return self.seam == self.position

    def seam_state(self, states: list[Tensor]) -> Tensor:
        """The state that the first step starts from."""
        return states[0]

    def seam_window(self, inputs: Tensor, taps: int) -> Tensor:
        """The conv window [B, taps - 1, 3C] that the first step starts from."""
        return inputs[:, -(taps - 1) :]

    def kept(self, log_decay: Tensor) -> Tensor:
        """Decay factors."""
        return log_decay.exp()

    def carried(self, state: Tensor) -> Tensor:
        """The state [B*H, V, K] as it is stored after a step."""
        return state

    def stored_rows(self, rows: Tensor) -> Tensor:
        """KV rows [B, T, 576] as attention reads them."""
        return rows

    def scores(self, scores: Tensor, position: Tensor) -> Tensor:
        """Scaled scores [B, H, n, T], masked causally; `position` [n] of the queries."""
        return scores

    def weighted(self, share: Tensor, latent: Tensor) -> Tensor:
        """Softmax shares [B, H, n, T] times latent rows [B, T, 512]."""
        part, largest = self.parts(share)
        return torch.einsum("bhnt,btc->bhnc", part, latent) * largest

    def parts(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """exp(score - largest score) [B, H, n, T] as they meet the values, and the largest share
        [B, H, n, 1]."""
        largest = share.amax(-1, keepdim=True)
        part = share / largest
        return rounded(part) if self.roundings.shares_to_bf16 else part, largest

    def source_bias(self, bias: Tensor, layer: int) -> Tensor:
        """Added to AttnRes scores: 0, or -inf for blocks that do not exist yet; the prefix is last."""
        return bias

    def selection(self, score: Tensor, ranked: Tensor, top_k: int, layer: int) -> Tensor:
        """Expert ids [N, k] from `ranked` ids [N, E], best first; `score` is what they were ranked by."""
        return ranked[:, :top_k]

    def expert_weights(self, w13: Tensor, w2: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Unpacked expert weights."""
        return w13, w2

    def mixed(self, weight: Tensor, layer: int) -> Tensor:
        """Routing weights [N, k]."""
        return weight

    def reduced(self, parts: Tensor, layer: int) -> Tensor:
        """Sum over ranks (heads, axis 0) of partial attention outputs [H, B, n, D]."""
        return parts.sum(0)

    def layer_input(self, x: Tensor, layer: int) -> Tensor:
        """Input [B, n, D] of the routed experts."""
        return x

    def logits(self, logits: Tensor) -> Tensor:
        """Logits [B, n, V]."""
        return logits


def load_model(tensors: Mapping[str, Tensor], shapes: K3Shapes, device: str = "cpu") -> Model:
    """A model from checkpoint tensors as stored."""
    ready: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if name.endswith("_weight_scale"):
            continue
        value = mxfp4_unpacked(t, tensors[f"{name}_scale"]) if name.endswith("_weight") else t.float()
        ready[name] = value.to(device)
    return Model(shapes, ready)


def rounded(x: Tensor) -> Tensor:
    """fp32 holding bf16 values."""
    return x.bfloat16().float()


@torch.no_grad()
def advance(model: Model, caches: Caches, tokens: Tensor, path: Path) -> Tensor:
    """Takes `tokens` [B, n] in after what `caches` hold (updated); logits [B, n, vocab]."""
    s, start = model.shapes, caches.position
    path.position = start
    assert s.attn_res_block is not None
    t = model.tensors
    prefix = t["model.embed_tokens.weight"][tokens]
    bank: list[Tensor] = []
    delta = torch.zeros_like(prefix)
    for i in range(s.layers):
        w, done, is_first = model.layer(i), -(-i // s.attn_res_block), i % s.attn_res_block == 0
        prefix, x = _mix(
            prefix, delta, bank[:done], w, "self_attention_res", w["input_layernorm.weight"], s, path, i
        )
        if is_first:
            bank.append(prefix)
        heads = _mla(w, x, caches, i, s, path) if s.is_mla(i) else _kda(w, x, caches, i, s, path)
        out = torch.unflatten(w["self_attn.o_proj.weight"], 1, (s.heads, -1))
        attended = rounded(path.reduced(torch.einsum("bnhp,dhp->hbnd", heads, out), i))
        base, step = (attended, torch.zeros_like(attended)) if is_first else (prefix, attended)
        prefix, x = _mix(
            base,
            step,
            bank[: done + is_first],
            w,
            "mlp_res",
            w["post_attention_layernorm.weight"],
            s,
            path,
            i,
        )
        delta = _ffn(w, x, i, s, path)
    final = Weights(t, "model.")
    _, x = _mix(prefix, delta, bank, final, "output_attn_res", t["model.norm.weight"], s, path, s.layers)
    caches.position = start + tokens.shape[1]
    return path.logits(x @ t["lm_head.weight"].T)


def _mix(
    prefix: Tensor,
    delta: Tensor,
    bank: list[Tensor],
    w: Weights,
    name: str,
    norm: Tensor,
    s: K3Shapes,
    path: Path,
    layer: int,
) -> tuple[Tensor, Tensor]:
    prefix = rounded(prefix + delta)
    score = w[f"{name}_norm.weight"] * w[f"{name}_proj.weight"][0]
    sources = torch.stack([*bank, prefix], -2)
    scores = (sources * score).sum(-1) * torch.rsqrt(sources.pow(2).mean(-1) + s.norm_eps)
    bias = path.source_bias(torch.zeros(len(bank) + 1, device=prefix.device), layer)
    mix = (torch.softmax(scores + bias, -1)[..., None] * sources).sum(-2)
    return prefix, rounded(_normed(mix, norm, s.norm_eps))


def _mla(w: Weights, x: Tensor, caches: Caches, layer: int, s: K3Shapes, path: Path) -> Tensor:
    eps, start, n = s.norm_eps, caches.position, x.shape[1]
    q_c = rounded(
        _normed(rounded(x @ w["self_attn.q_a_proj.weight"].T), w["self_attn.q_a_layernorm.weight"], eps)
    )
    q = _by_head(rounded(q_c @ w["self_attn.q_b_proj.weight"].T), s)
    kv = rounded(x @ w["self_attn.kv_a_proj_with_mqa.weight"].T)
    latent = rounded(_normed(kv[..., : s.kv_lora], w["self_attn.kv_a_layernorm.weight"], eps))
    new = torch.cat([latent, kv[..., s.kv_lora :]], -1)
    if caches.kv_dtype == "fp8":
        new = to_cache(new, FP8_KV_SCALE, torch.float8_e4m3fn).float() * FP8_KV_SCALE
    rows = torch.cat([caches.rows[layer], new], 1) if layer in caches.rows else new
    caches.rows[layer] = rows
    seen = path.stored_rows(rows)
    up = torch.unflatten(w["self_attn.kv_b_proj.weight"], 0, (s.heads, -1))
    q_latent = rounded(torch.einsum("bnhd,hdc->bhnc", q[..., : s.qk_nope], up[:, : s.qk_nope]))
    query = torch.cat([q_latent, q[..., s.qk_nope :].transpose(1, 2)], -1)
    scores = query @ seen[:, None].transpose(-1, -2) * (s.qk_nope + s.qk_rope) ** -0.5
    position = start + torch.arange(n, device=x.device)
    hidden = torch.arange(seen.shape[1], device=x.device)[None] > position[:, None]
    scores = path.scores(scores.masked_fill(hidden, -torch.inf), position)
    lat = path.weighted(torch.softmax(scores, -1), seen[..., : s.kv_lora])
    lat = rounded(lat) if path.roundings.latent_to_bf16 else lat
    value = rounded(torch.einsum("bhnc,hdc->bnhd", lat, up[:, s.qk_nope :]))
    gate = _by_head(rounded(x @ w["self_attn.g_proj.weight"].T), s)
    return rounded(value * torch.sigmoid(gate))


def _kda(w: Weights, x: Tensor, caches: Caches, layer: int, s: K3Shapes, path: Path) -> Tensor:
    taps, width = s.conv_width, s.head_dim
    raw = torch.cat([rounded(x @ w[f"self_attn.{p}_proj.weight"].T) for p in "qkv"], -1)
    before = caches.inputs.get(layer, raw.new_zeros(x.shape[0], taps - 1, raw.shape[-1]))
    window = path.seam_window(before, taps) if path.is_at_seam else before[:, -(taps - 1) :]
    series = torch.cat([window, raw], 1)
    caches.inputs[layer] = torch.cat([before, raw], 1)[:, -2 * taps :]
    conv = torch.cat([w[f"self_attn.{p}_conv1d.weight"][:, 0] for p in "qkv"])
    y = nnf.silu(
        sum((series[:, j : j + x.shape[1]] * conv[:, j] for j in range(taps)), torch.zeros_like(raw))
    )
    y = rounded(y) if path.roundings.conv_to_bf16 else y
    q, k, v = (_by_head(p, s) for p in y.chunk(3, -1))
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * width**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    f_a = rounded(x @ w["self_attn.f_a_proj.weight"].T)
    decay = _by_head(rounded(f_a @ w["self_attn.f_b_proj.weight"].T) + w["self_attn.dt_bias"], s)
    assert s.decay_lower_bound is not None
    kept = path.kept(s.decay_lower_bound * torch.sigmoid(w["self_attn.A_log"].exp()[:, None] * decay))
    beta = torch.sigmoid(rounded(x @ w["self_attn.b_proj.weight"].T))
    o = rounded(_recurrence(q, k, v, kept, beta, caches, layer, path))
    gate = _by_head(rounded(x @ w["self_attn.g_proj.weight"].T), s)
    return rounded(_normed(o, w["self_attn.o_norm.weight"], s.norm_eps) * torch.sigmoid(gate))


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, beta: Tensor, caches: Caches, layer: int, path: Path
) -> Tensor:
    rows, n, heads, width = q.shape
    before = caches.states.get(layer, [q.new_zeros(rows * heads, width, width)])
    state = (path.seam_state(before) if path.is_at_seam else before[0]).clone()
    out = torch.empty(n, rows * heads, width, device=q.device)
    recent = list(before)
    q, k, v, kept, strength = (
        p.transpose(0, 1).flatten(1, 2).contiguous() for p in (q, k, v, kept, beta[..., None])
    )
    for t in range(n):
        state.mul_(kept[t][:, None])
        change = (v[t] - (state @ k[t][..., None])[..., 0]).mul_(strength[t])
        state.baddbmm_(change[..., None], k[t][:, None])
        state = path.carried(state)
        torch.bmm(state, q[t][..., None], out=out[t][..., None])
        if t >= n - _KEPT_STATES:
            recent.insert(0, state.clone())
    caches.states[layer] = recent[:_KEPT_STATES]
    return out.view(n, rows, heads, width).transpose(0, 1)


def _ffn(w: Weights, x: Tensor, layer: int, s: K3Shapes, path: Path) -> Tensor:
    prefix = "mlp." if layer == 0 else "block_sparse_moe.shared_experts."
    gate, up = (rounded(x @ w[f"{prefix}{p}_proj.weight"].T) for p in ("gate", "up"))
    shared = rounded(rounded(_situ(gate, up)) @ w[f"{prefix}down_proj.weight"].T)
    if layer == 0:
        return shared
    latent = rounded(path.layer_input(x, layer) @ w["block_sparse_moe.latent_down_proj.weight"].T)
    combined = rounded(_experts(w, x, latent, layer, s, path))
    normed = rounded(_normed(combined, w["block_sparse_moe.routed_expert_norm.weight"], s.norm_eps))
    return rounded(shared + normed @ w["block_sparse_moe.latent_up_proj.weight"].T)


def _experts(w: Weights, x: Tensor, latent: Tensor, layer: int, s: K3Shapes, path: Path) -> Tensor:
    score = torch.sigmoid(x @ w["block_sparse_moe.gate.weight"].T).flatten(0, 1)
    chosen_by = score + w["block_sparse_moe.gate.e_score_correction_bias"]
    ranked = torch.sort(chosen_by, dim=-1, descending=True, stable=True).indices
    ids = path.selection(chosen_by, ranked, s.top_k, layer)
    weight = score.gather(1, ids)
    weight = path.mixed(s.routed_scale * weight / (weight.sum(-1, keepdim=True) + 1e-20), layer)
    weight = rounded(weight) if path.roundings.router_to_bf16 else weight
    dense = torch.zeros_like(score).scatter(1, ids, weight)
    w13, w2 = path.expert_weights(
        w["block_sparse_moe.experts.w13_weight"], w["block_sparse_moe.experts.w2_weight"], layer
    )
    z = latent.flatten(0, 1)
    combined = torch.zeros_like(z)
    for e in range(s.experts):
        used = dense[:, e].nonzero()[:, 0]
        gate, up = (rounded(p) for p in (z[used] @ w13[e].T).chunk(2, -1))
        hidden = _situ(gate, up)
        hidden = rounded(hidden) if path.roundings.expert_hidden_to_bf16 else hidden
        y = hidden @ w2[e].T
        y = rounded(y) if path.roundings.experts_to_bf16 else y
        combined.index_add_(0, used, y * dense[used, e, None])
    return combined.view_as(latent)


def _by_head(x: Tensor, s: K3Shapes) -> Tensor:
    """Last axis split into heads."""
    return torch.unflatten(x, -1, (s.heads, -1))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
