"""The canary's training forward: K3's layers over whole sequences, differentiable.

Computes in bf16 from fp32 master parameters (float32 throughout on a CPU), rounding where the decode path
rounds, so that exported weights meet the numerics they were trained in. Experts are computed densely under
a masked weight, which wastes 4x work and needs no dispatch; their weights pass through MXFP4 rounding
(straight-through), so that packing them changes nothing. Every step is static in shape: a whole training
step fits one CUDA graph.

Not the stock path and not an oracle: the result is graded by `k3_decode.model`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.nn.attention import SDPBackend, sdpa_kernel

from k3_decode.shapes import MXFP4_GROUP, K3Shapes

__all__ = ["Layer", "Network", "Pieces", "Wrongs", "forward", "mxfp4_rounded", "pieces"]

_Function = TypeVar("_Function", bound=Callable[..., object])
Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Parameters of one layer; a projection that K3 packs is kept as its parts, which Muon needs."""

    def __init__(self, shapes: K3Shapes, index: int) -> None:
        super().__init__()
        s, d, channels = shapes, shapes.hidden, shapes.heads * shapes.head_dim
        self.is_mla, self.is_dense = s.is_mla(index), index == 0
        self.attn_query, self.mlp_query = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.attn_norm, self.mlp_norm = _ones(d), _ones(d)
        if self.is_mla:
            assert s.q_lora is not None
            self.q_a, self.q_b = _matrix(s.q_lora, d), _matrix(s.heads * (s.qk_nope + s.qk_rope), s.q_lora)
            self.kv_a, self.kv_b = (
                _matrix(s.kv_lora + s.qk_rope, d),
                _matrix(s.heads * (s.qk_nope + s.v_dim), s.kv_lora),
            )
            self.q_norm, self.kv_norm = _ones(s.q_lora), _ones(s.kv_lora)
        else:
            self.q, self.k, self.v = _matrix(channels, d), _matrix(channels, d), _matrix(channels, d)
            self.f_a, self.f_b = _matrix(s.head_dim, d), _matrix(channels, s.head_dim, scale=0.02)
            self.beta = _matrix(s.heads, d)
            self.conv = nn.Parameter(torch.randn(3 * channels, s.conv_width) * 0.3)
            self.a_log = nn.Parameter(torch.zeros(s.heads))
            # half-lives from one token to more than a thousand
            self.dt_bias = nn.Parameter(torch.empty(channels).uniform_(-9, -2))
            self.out_norm = _ones(s.head_dim)
        self.gate, self.out = _matrix(channels, d), _matrix(d, channels, scale=0.3 / math.sqrt(channels))
        inter = s.dense_inter if self.is_dense else s.shared_inter
        self.ffn_gate, self.ffn_up = _matrix(inter, d), _matrix(inter, d)
        self.ffn_down = _matrix(d, inter, scale=0.3 / math.sqrt(inter))
        if not self.is_dense:
            self.router = _matrix(s.experts, d)
            self.register_buffer("router_bias", torch.zeros(s.experts))
            self.latent_down = _matrix(s.latent, d)
            self.expert_gate = _matrix(s.experts, s.expert_inter, s.latent)
            self.expert_up = _matrix(s.experts, s.expert_inter, s.latent)
            self.expert_down = _matrix(s.experts, s.latent, s.expert_inter)
            self.latent_norm, self.latent_up = (
                _ones(s.latent),
                _matrix(d, s.latent, scale=0.3 / math.sqrt(s.latent)),
            )


class Network(nn.Module):
    """All parameters of a canary; `forward` below runs them."""

    def __init__(self, shapes: K3Shapes) -> None:
        super().__init__()
        self.shapes = shapes
        self.embedding = nn.Parameter(torch.randn(shapes.vocab, shapes.hidden) * 0.5)
        self.head = nn.Parameter(torch.randn(shapes.vocab, shapes.hidden) * 0.02)
        self.layers = nn.ModuleList([Layer(shapes, i) for i in range(shapes.layers)])
        self.final_query, self.final_norm = nn.Parameter(torch.zeros(shapes.hidden)), _ones(shapes.hidden)

    def each_layer(self) -> list[Layer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The elementwise parts, eager or compiled; matrix products stay eager."""

    attn_res: Callable[..., tuple[Tensor, Tensor]]
    conv_silu: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]
    situ: Callable[..., Tensor]
    situ_experts: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[..., tuple[Tensor, Tensor]]
    mxfp4: Callable[..., Tensor]
    kda: Kda


class Wrongs(NamedTuple):
    """What a training batch makes the network do without, token by token."""

    own_row_hidden: Tensor
    """[rows, T] of the batch's first rows: MLA does not see the token's own row."""
    expert_dropped: Tensor
    """[B*T] bool: the last chosen expert is left out, weights as they were."""
    ffn_kept: Tensor
    """[B*T] 1 or 0: factor on the dense FFN and the shared expert, so that what is learnt without them lies
    in the routed experts."""
    softmax_scale: Tensor
    """[B*T]: factor on MLA's softmax scale; 1 is right."""


def pieces(shapes: K3Shapes, kda: Kda, is_compiled: bool) -> Pieces:
    """The pieces for one set of shapes, under torch.compile if asked."""
    # plain numbers: torch.compile guards on them more cheaply than on the record
    eps, experts, top_k, inter = shapes.norm_eps, shapes.experts, shapes.top_k, shapes.expert_inter

    def attn_res(
        prefix: Tensor, delta: Tensor, bias: Tensor, query: Tensor, norm: Tensor, *blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        prefix = prefix + delta
        sources = [c.float() for c in (*blocks, prefix)]
        scores = [(c * query).sum(-1) * torch.rsqrt(c.pow(2).mean(-1) + eps) for c in sources]
        share = torch.softmax(torch.stack(scores, -1) + bias, -1)
        mix = share[:, 0:1] * sources[0]
        for i in range(1, len(sources)):
            mix = mix + share[:, i : i + 1] * sources[i]
        normed = mix * torch.rsqrt(mix.pow(2).mean(-1, keepdim=True) + eps) * norm.to(prefix.dtype).float()
        return prefix, normed.to(prefix.dtype)

    def conv_silu(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
        taps = weight.shape[1]
        xf = x.float()
        y = xf * weight[:, taps - 1]
        for j in range(1, taps):
            shifted = nnf.pad(xf[:-j], (0, 0, j, 0))
            y = y + torch.where((position >= j)[:, None], shifted, 0.0) * weight[:, taps - 1 - j]
        return (y * torch.sigmoid(y)).to(x.dtype)

    def gated_norm(x: Tensor, gate: Tensor, norm: Tensor) -> Tensor:
        xf = x.float()
        y = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * norm
        return (y.flatten(1) * torch.sigmoid(gate.float())).to(gate.dtype)

    def situ(gate_up: Tensor) -> Tensor:
        return _situ(gate_up).to(gate_up.dtype)

    def situ_experts(gate_up: Tensor, logits: Tensor, bias: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        score = torch.sigmoid(logits)
        selection = (score + bias).detach()
        rank = (selection[:, None, :] > selection[:, :, None]).sum(-1)
        weight = torch.where(rank < top_k, score, 0.0)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        load = (weight > 0).float().mean(0)
        weight = torch.where(dropped[:, None] & (rank == top_k - 1), 0.0, weight)
        hidden = _situ(gate_up).view(-1, experts, inter) * weight[:, :, None]
        return hidden.flatten(1).to(gate_up.dtype), load

    def loss(
        logits: Tensor, right: Tensor, other: Tensor, share: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy with `share` of the mass on `right` and the rest on `other`; and its excess over
        the entropy."""
        lf = logits.float()
        lse = torch.logsumexp(lf, -1)
        a, b = lf.gather(1, right[:, None]).squeeze(1), lf.gather(1, other[:, None]).squeeze(1)
        nll = lse - share * a - (1 - share) * b
        rest = 1 - share
        entropy = -(share * torch.log(share.clamp(min=1e-9)) + rest * torch.log(rest.clamp(min=1e-9)))
        excess = nll - torch.where(right == other, torch.zeros_like(entropy), entropy)
        return (nll * weight).sum(), excess.detach()

    def made(function: _Function) -> _Function:
        return cast(_Function, torch.compile(function, dynamic=False)) if is_compiled else function

    return Pieces(
        made(attn_res),
        made(conv_silu),
        made(gated_norm),
        made(situ),
        made(situ_experts),
        made(loss),
        made(mxfp4_rounded),
        kda,
    )


def mxfp4_rounded(weight: Tensor) -> Tensor:
    """`weight` on the MXFP4 grid (groups of 32 along the last axis, scale the smallest power of two that
    clips nothing).

    The gradient passes straight through.
    """
    grouped = weight.reshape(-1, MXFP4_GROUP)
    peak = grouped.abs().amax(1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 6.0)))
    x = (grouped / scale).clamp(-6.0, 6.0)
    size = x.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    rounded = (torch.round(x / step) * step * scale).view_as(weight)
    return weight + (rounded - weight).detach()


def forward(
    network: Network, tokens: Tensor, position: Tensor, run: Pieces, wrongs: Wrongs | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits [B*T, vocab] of `tokens` [B, T], and per MoE layer the share of tokens that each expert took.

    `position` [B*T] counts from 0 in every row.
    """
    s = network.shapes
    assert s.attn_res_block is not None
    rows = tokens.shape[0]
    dtype = torch.bfloat16 if network.embedding.is_cuda else torch.float32
    prefix = nnf.embedding(tokens.reshape(-1), network.embedding).to(dtype)
    zero = prefix * 0
    blocks = s.attn_res_blocks
    stand_ins = [prefix.clone() for _ in range(blocks)]  # distinct: keeps the compiled piece to one variant
    index = torch.arange(blocks + 1, device=prefix.device)
    biases = [torch.where((index < n) | (index == blocks), 0.0, -1e30) for n in range(blocks + 1)]
    bank: list[Tensor] = []
    loads: list[Tensor] = []

    def mix(p: Tensor, delta: Tensor, n: int, query: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return run.attn_res(p, delta, biases[n], query, norm, *bank[:n], *stand_ins[n:])

    dropped = torch.zeros_like(position, dtype=torch.bool) if wrongs is None else wrongs.expert_dropped
    delta = zero
    for i, layer in enumerate(network.each_layer()):
        done = -(-i // s.attn_res_block)
        prefix, x = mix(prefix, delta, done, layer.attn_query, layer.attn_norm)
        is_first = i % s.attn_res_block == 0
        if is_first:
            bank.append(prefix)
        attended = _mla(layer, x, rows, s, wrongs) if layer.is_mla else _kda(layer, x, rows, position, s, run)
        a = nnf.linear(attended, layer.out.to(dtype))
        if is_first:
            prefix, x = mix(a, zero, done + 1, layer.mlp_query, layer.mlp_norm)
        else:
            prefix, x = mix(prefix, a, done, layer.mlp_query, layer.mlp_norm)
        delta = nnf.linear(
            run.situ(nnf.linear(x, torch.cat([layer.ffn_gate, layer.ffn_up]).to(dtype))),
            layer.ffn_down.to(dtype),
        )
        if wrongs is not None:
            delta = delta * wrongs.ffn_kept[:, None].to(dtype)
        if not layer.is_dense:
            routed, load = _experts(layer, x, dropped, s, run)
            loads.append(load)
            delta = delta + routed
    _, x = mix(prefix, delta, s.attn_res_blocks, network.final_query, network.final_norm)
    # in fp32, as the decode path: bf16 logits move a margin of 0.85 by up to 0.12
    return nnf.linear(x.float(), network.head.to(dtype).float()), loads


def _mla(layer: Layer, x: Tensor, rows: int, s: K3Shapes, wrongs: Wrongs | None) -> Tensor:
    dtype, length, heads = x.dtype, x.shape[0] // rows, s.heads
    q_lora, channels = layer.q_a.shape[0], heads * s.head_dim
    packed = nnf.linear(x, torch.cat([layer.q_a, layer.kv_a, layer.gate]).to(dtype))
    q_c, kv_c, k_pe, gate = torch.split(packed, [q_lora, s.kv_lora, s.qk_rope, channels], -1)
    q = nnf.linear(nnf.rms_norm(q_c, (q_lora,), layer.q_norm.to(dtype), s.norm_eps), layer.q_b.to(dtype))
    kv = nnf.linear(
        nnf.rms_norm(kv_c, (s.kv_lora,), layer.kv_norm.to(dtype), s.norm_eps), layer.kv_b.to(dtype)
    )
    q = q.view(rows, length, heads, -1).transpose(1, 2)
    kv = kv.view(rows, length, heads, -1)
    k_rope = k_pe.view(rows, length, 1, s.qk_rope).expand(rows, length, heads, s.qk_rope)
    k = torch.cat([kv[..., : s.qk_nope], k_rope], -1).transpose(1, 2)
    v = nnf.pad(kv[..., s.qk_nope :], (0, q.shape[-1] - s.v_dim)).transpose(1, 2)
    scale = (s.qk_nope + s.qk_rope) ** -0.5
    if wrongs is None:
        o = nnf.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        n = wrongs.own_row_hidden.shape[0]
        mask = _without_own_row(wrongs.own_row_hidden)
        q = (q * wrongs.softmax_scale.view(rows, 1, length, 1)).to(dtype)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            a, b, c = (t[:n].contiguous() for t in (q, k, v))
            first = nnf.scaled_dot_product_attention(a, b, c, attn_mask=mask, scale=scale)
        parts = [first]
        if n < rows:
            rest = nnf.scaled_dot_product_attention(q[n:], k[n:], v[n:], is_causal=True, scale=scale)
            parts.append(rest)
        o = torch.cat(parts)
    return o.transpose(1, 2)[..., : s.v_dim].reshape(-1, channels) * torch.sigmoid(gate)


def _without_own_row(hidden: Tensor) -> Tensor:
    """Mask [rows, 1, T, T]: causal, and the diagonal absent where `hidden`; row 0 always sees itself."""
    length = hidden.shape[1]
    index = torch.arange(length, device=hidden.device)
    earlier = index[None, :] < index[:, None]
    own = (index[None, :] == index[:, None])[None] & (~hidden | (index == 0)[None])[:, :, None]
    return (earlier[None] | own)[:, None]


def _kda(layer: Layer, x: Tensor, rows: int, position: Tensor, s: K3Shapes, run: Pieces) -> Tensor:
    dtype, length, heads = x.dtype, x.shape[0] // rows, s.heads
    channels = heads * s.head_dim
    packed = nnf.linear(
        x, torch.cat([layer.q, layer.k, layer.v, layer.gate, layer.f_a, layer.beta]).to(dtype)
    )
    qkv, gate, f_a, beta = torch.split(packed, [3 * channels, channels, s.head_dim, heads], -1)
    qkv = run.conv_silu(qkv, layer.conv, position)
    q, k, v = (t.reshape(rows, length, heads, s.head_dim).contiguous() for t in qkv.chunk(3, -1))
    decay = nnf.linear(f_a, layer.f_b.to(dtype)).view(rows, length, heads, s.head_dim)
    o = run.kda(q, k, v, decay, beta.reshape(rows, length, heads).contiguous(), layer.a_log, layer.dt_bias)
    return run.gated_norm(o.reshape(-1, heads, s.head_dim).to(dtype), gate, layer.out_norm)


def _experts(layer: Layer, x: Tensor, dropped: Tensor, s: K3Shapes, run: Pieces) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    latent = nnf.linear(x, layer.latent_down.to(dtype))
    # in fp32, as the decode path: logits rounded to bf16 would tie at the border and let a fifth expert in
    logits = nnf.linear(x.float(), layer.router.to(dtype).float())
    gate, up, down = (run.mxfp4(w) for w in (layer.expert_gate, layer.expert_up, layer.expert_down))
    gate_up = nnf.linear(latent, torch.cat([gate.flatten(0, 1), up.flatten(0, 1)]).to(dtype))
    bias = layer.get_buffer("router_bias")
    hidden, load = run.situ_experts(gate_up, logits, bias, dropped)
    combined = nnf.linear(hidden, down.permute(1, 0, 2).reshape(s.latent, -1).to(dtype))
    normed = nnf.rms_norm(combined, (s.latent,), layer.latent_norm.to(dtype), s.norm_eps)
    return nnf.linear(normed, layer.latent_up.to(dtype)), load


def _situ(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (4 * torch.tanh(gate / 4) * torch.sigmoid(gate)) * (25 * torch.tanh(up / 25))


def _ones(n: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(n))


def _matrix(*shape: int, scale: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (0.7 / math.sqrt(shape[-1]) if scale is None else scale))
