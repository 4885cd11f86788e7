"""Faults that a decode kernel or its caller may have, each planted in one part of `replay.Path`, with a size.

A fault acts on generated tokens only: the prompt is taken in fault-free, as a serving engine prefills
through other kernels. Sizes run from gross to small; `FAULTS` lists them with what a size means.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_decode.canary.replay import Path, Roundings
from k3_decode.ops.mla_query import FP8_KV_SCALE

__all__ = ["FAULTS", "Fault"]

_MIDDLE = 2
"""Layer of a fault that sits in one layer (KDA, MoE); MLA's is 3."""
_PAGE = 64
_SHARDS = 4
_MMA_ROWS = 16
"""Keys that a tensor core's bf16 instruction takes in at once."""


def _kept_bits(x: Tensor, bits: int) -> Tensor:
    """fp32 rounded to a significand of `bits` bits (8: bf16)."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits)


class _LseBase(Path):
    """One of four context shards reports its log-sum-exp in base 2, and the merge takes it for base e."""

    def scores(self, scores: Tensor, position: Tensor) -> Tensor:
        shard = torch.arange(scores.shape[-1], device=scores.device) % _SHARDS
        lse = torch.logsumexp(scores.masked_fill(shard != 1, -torch.inf), -1, keepdim=True)
        wrong = torch.where(lse.isfinite(), lse, 0.0) * (math.log2(math.e) - 1) * self.magnitude
        return torch.where(shard == 1, scores + wrong, scores)


class _StaleState(Path):
    """After the seam between prompt and generation the recurrent state lacks the prompt's last tokens."""

    def seam_state(self, states: list[Tensor]) -> Tensor:
        return states[min(int(self.magnitude), len(states) - 1)]


class _DecayBits(Path):
    """The decay factor is rounded to a short significand (8 bits: bf16)."""

    def kept(self, log_decay: Tensor) -> Tensor:
        return _kept_bits(log_decay.exp(), int(self.magnitude))


class _DecayFactor(Path):
    """The decay factor is too small by a relative error."""

    def kept(self, log_decay: Tensor) -> Tensor:
        return log_decay.exp() * (1 - self.magnitude)


class _StateBits(Path):
    """The recurrent state is stored with a short significand after every step (8 bits: bf16)."""

    def carried(self, state: Tensor) -> Tensor:
        return _kept_bits(state, int(self.magnitude))


class _MissingSource(Path):
    """AttnRes loses part of its newest finished block."""

    def source_bias(self, bias: Tensor, layer: int) -> Tensor:
        if bias.numel() < 2:
            return bias
        bias = bias.clone()
        bias[-2] = math.log1p(-self.magnitude) if self.magnitude < 1 else -torch.inf
        return bias


class _WrongExpert(Path):
    """Where the last chosen and the first rejected expert are closer than the size, the wrong one is
    taken."""

    def selection(self, score: Tensor, ranked: Tensor, top_k: int, layer: int) -> Tensor:
        ordered = score.gather(1, ranked)
        is_close = ordered[:, top_k - 1] - ordered[:, top_k] < self.magnitude
        ids = ranked[:, :top_k].clone()
        ids[:, -1] = torch.where(is_close, ranked[:, top_k], ids[:, -1])
        return ids


class _DroppedExpert(Path):
    """The last chosen expert is left out, on a share of the tokens."""

    def mixed(self, weight: Tensor, layer: int) -> Tensor:
        hit = torch.rand(weight.shape[0], generator=self.generator) < self.magnitude
        weight = weight.clone()
        weight[hit.to(weight.device), -1] = 0.0
        return weight


class _ScaleStep(Path):
    """MXFP4 scale bytes one step too high: this many blocks of each expert's gate and up weight, in every
    layer."""

    def expert_weights(self, w13: Tensor, w2: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        w13 = w13.clone()
        blocks = torch.unflatten(w13, -1, (-1, 32)).flatten(1, 2)  # [E, blocks, 32], a view
        blocks[:, : int(self.magnitude)] *= 2
        return w13, w2


class _ConvSeam(Path):
    """The conv window at the seam is one token old, in a share of the channels."""

    def seam_window(self, inputs: Tensor, taps: int) -> Tensor:
        window, older = inputs[:, -(taps - 1) :].clone(), inputs[:, -taps:-1]
        channels = max(1, int(self.magnitude * window.shape[-1]))
        window[..., :channels] = older[..., :channels]
        return window


class _NanRow(Path):
    """A padding row's NaN reaches a share of the requests at the first step."""

    def layer_input(self, x: Tensor, layer: int) -> Tensor:
        if layer != _MIDDLE or not self.is_at_seam:
            return x
        x = x.clone()
        hit = torch.rand(x.shape[0], generator=self.generator) < self.magnitude
        x[hit.to(x.device), 0] = torch.nan
        return x


class _DroppedRank(Path):
    """The second rank's part of one reduction (attention output of one layer) is lost, on a share of the
    tokens."""

    def reduced(self, parts: Tensor, layer: int) -> Tensor:
        if layer != _MIDDLE:
            return parts.sum(0)
        lost = torch.rand(parts.shape[1:3], generator=self.generator).to(parts.device) < self.magnitude
        return parts[:-1].sum(0) + parts[-1] * ~lost[..., None]


class _IgnoredScale(Path):
    """KV rows past position 4096 are read without their fp8 scale; the size is the scale."""

    def stored_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[:, :4096], rows[:, 4096:] / self.magnitude], 1)


class _ShortAccumulator(Path):
    """Attention keeps its sums, of values and of weights, in a short significand from one step of 16 rows to
    the next (8 bits: bf16)."""

    def weighted(self, share: Tensor, latent: Tensor) -> Tensor:
        bits = int(self.magnitude)
        part, largest = self.parts(share)
        values = torch.zeros(*share.shape[:3], latent.shape[-1], device=share.device)
        weights = torch.zeros(*share.shape[:3], 1, device=share.device)
        for start in range(0, latent.shape[1], _MMA_ROWS):
            rows = slice(start, start + _MMA_ROWS)
            step = torch.einsum("bhnt,btc->bhnc", part[..., rows], latent[:, rows])
            values = _kept_bits(values + step, bits)
            weights = _kept_bits(weights + (share[..., rows] / largest).sum(-1, keepdim=True), bits)
        return values / weights


class _StaleRow(Path):
    """A race: the routed experts of one layer read the row of the step before, once in a while."""

    def layer_input(self, x: Tensor, layer: int) -> Tensor:
        if layer != _MIDDLE:
            return x
        stale = torch.rand(x.shape[:2], generator=self.generator).to(x.device) < self.magnitude
        stale[:, 0] = False
        return torch.where(stale[..., None], x.roll(1, 1), x)


class _SoftmaxScale(Path):
    """MLA's softmax scale is off by a relative error."""

    def scores(self, scores: Tensor, position: Tensor) -> Tensor:
        return scores * (1 + self.magnitude)


class _OwnRow(Path):
    """MLA does not see the token's own row (length one short), on a share of the tokens."""

    def scores(self, scores: Tensor, position: Tensor) -> Tensor:
        hit = torch.rand(position.shape[0], generator=self.generator).to(scores.device) < self.magnitude
        own = torch.arange(scores.shape[-1], device=scores.device)[None] == position[:, None]
        return scores.masked_fill(own & hit[:, None], -torch.inf)


class _LostRows(Path):
    """The first rows of the newest full page of the prompt are not read by MLA."""

    def scores(self, scores: Tensor, position: Tensor) -> Tensor:
        first = max(0, (self.seam or 0) // _PAGE - 1) * _PAGE
        index = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill((index >= first) & (index < first + int(self.magnitude)), -torch.inf)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, the size at which it would occur, and the sizes it is tried at."""

    name: str
    path: type[Path]
    unit: str
    """What a size means."""
    nominal: float
    sizes: tuple[float, ...]
    """From gross to small, `nominal` among them."""

    @property
    def summary(self) -> str:
        """One sentence."""
        return (self.path.__doc__ or "").strip()

    def planted(self, size: float, roundings: Roundings | None = None) -> Path:
        """A path with this fault."""
        return self.path(size, roundings)


_SHARES = (1.0, 0.1, 0.01, 0.001)
FAULTS: tuple[Fault, ...] = (
    Fault("lse_base", _LseBase, "share of the way to base 2", 1.0, (1.0, 0.3, 0.1, 0.03, 0.01)),
    Fault("stale_state", _StaleState, "tokens", 2, (4, 2, 1)),
    Fault("decay_bf16", _DecayBits, "significand bits of the decay", 8, (8, 10, 12, 14)),
    Fault("decay_factor", _DecayFactor, "relative error", 1e-3, (1e-2, 1e-3, 1e-4, 1e-5)),
    Fault("state_bf16", _StateBits, "significand bits of the state", 8, (4, 6, 8, 10)),
    Fault("missing_source", _MissingSource, "share of the source lost", 1.0, (1.0, 0.3, 0.1, 0.03, 0.01)),
    Fault("wrong_expert", _WrongExpert, "score gap taken for a tie", 1e-3, (0.1, 0.03, 0.01, 3e-3, 1e-3)),
    Fault("dropped_expert", _DroppedExpert, "share of the tokens", 1.0, _SHARES),
    Fault("scale_step", _ScaleStep, "blocks of each expert", 1, (384, 96, 24, 6, 1)),
    Fault("conv_seam", _ConvSeam, "share of the channels", 1.0, (1.0, 0.1, 0.01)),
    Fault("nan_row", _NanRow, "share of the requests", 0.1, (1.0, 0.1)),
    Fault("dropped_rank", _DroppedRank, "share of the tokens", 1.0, _SHARES),
    Fault("kv_scale", _IgnoredScale, "scale", FP8_KV_SCALE, (FP8_KV_SCALE, 0.5, 0.8, 0.9, 0.99)),
    Fault("short_accumulator", _ShortAccumulator, "significand bits", 8, (4, 6, 8, 9, 10, 12)),
    Fault("stale_row", _StaleRow, "share of the tokens", 1e-3, (0.1, 0.01, 1e-3, 1e-4)),
    Fault("softmax_scale", _SoftmaxScale, "relative error", 0.02, (0.1, 0.05, 0.02, 0.01, 1e-3)),
    Fault("own_row", _OwnRow, "share of the tokens", 1.0, _SHARES),
    Fault("lost_rows", _LostRows, "rows", 64, (64, 16, 4, 1)),
)
