"""KDA over many tokens at once: the chunked (WY) form of the recurrence in `ops/kda_step.py`, in fp32.

Within a chunk of C tokens with cumulative log-decays G and entry state S0 (per head, K key channels):
  u_t = beta_t (v_t - S_{t-1} a_t k_t) solves (I + diag(beta) tril(A, -1)) U = diag(beta) (V - (K e^G) S0^T),
  A_tj = sum_k k_t k_j e^(G_t - G_j);   O = (Q e^G) S0^T + tril(P) U,  P_tj = sum_k q_t k_j e^(G_t - G_j);
  S_C = S0 e^(G_C) + U^T (K e^(G_C - G)).
A and P are products of rows scaled by e^(G - M) and e^(M - G), M the chunk's middle; with the bounded decay
of at least -5 a token no exponent exceeds 40. Where a decay without bound goes further, they come from
differences G_t - G_j, which are never positive. Only the last line and the two products with S0 run chunk
after chunk.
"""

import torch
from torch.nn import functional

from k3_decode.ops.kda_step import HEAD_DIM, NORM_EPS_QK, log_decay

__all__ = ["KdaInputs", "advance", "convolve"]

CHUNK = 16
CHUNKS_AT_ONCE = 64
"""Chunks that are prepared together; with unbounded decay they hold 8 MiB a head."""
LARGEST_EXPONENT = 60.0
"""Of a scaled row; e^60 squared times 128 stays below fp32's largest number."""


class KdaInputs:
    """Normalised q and k, v, log-decays and betas of T tokens: fp32 [T, H, 128], betas [T, H]."""

    def __init__(
        self,
        convolved: torch.Tensor,
        raw_decay: torch.Tensor,
        raw_beta: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: float | None,
    ) -> None:
        q, k, self.v = convolved.view(-1, 3, a_log.shape[0], HEAD_DIM).unbind(1)
        self.q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + NORM_EPS_QK) * HEAD_DIM**-0.5
        self.k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + NORM_EPS_QK)
        self.g = log_decay(raw_decay, a_log, dt_bias, lower_bound)
        self.beta = torch.sigmoid(raw_beta.float())


def convolve(history: torch.Tensor, rows: torch.Tensor, conv_weight: torch.Tensor) -> torch.Tensor:
    """fp32 SiLU of the causal convolution [T, 3P] of rows [T, 3P] that follow `history` [3, 3P]."""
    channels = rows.shape[1]
    taps = conv_weight.permute(0, 2, 1).reshape(channels, 1, 4)
    inputs = torch.cat((history, rows)).float().T.unsqueeze(0)
    return functional.silu(functional.conv1d(inputs, taps, groups=channels)[0].T)


def advance(inputs: KdaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each query reads, fp32 [T, H, 128], and the state [H, V, K] after the last token."""
    tokens = inputs.q.shape[0]
    outs = []
    span = CHUNK * CHUNKS_AT_ONCE
    for start in range(0, tokens, span):
        part = slice(start, min(start + span, tokens))
        read, state = _advance_span(inputs, part, state)
        outs.append(read)
    return torch.cat(outs), state


def _advance_span(inputs: KdaInputs, part: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = part.stop - part.start
    q, k, v, g = (_chunks(tensor[part]) for tensor in (inputs.q, inputs.k, inputs.v, inputs.g))
    beta = _chunks(inputs.beta[part].unsqueeze(-1))
    total = g.cumsum(2)
    among_keys, among_queries = _among(q, k, total)
    system = beta * among_keys.tril(-1)
    right = beta * torch.cat((v, k * total.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split(HEAD_DIM, dim=-1)
    queries = q * total.exp()
    leaving = k * torch.exp(total[:, :, -1:] - total)
    last = total[:, :, -1].exp().unsqueeze(2)

    reads = []
    for n in range(q.shape[0]):
        values = own[n] - from_state[n] @ state.transpose(1, 2)
        reads.append(queries[n] @ state.transpose(1, 2) + among_queries[n] @ values)
        state = state * last[n] + values.transpose(1, 2) @ leaving[n]
    return torch.stack(reads).permute(0, 2, 1, 3).flatten(0, 1)[:tokens], state


def _among(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A, of which the part below the diagonal counts, and P with zeros above it: [n, H, C, C]."""
    middle = total[:, :, CHUNK // 2 - 1 : CHUNK // 2]
    furthest = torch.maximum(
        (total[:, :, 0] - middle[:, :, 0]).max(), (middle[:, :, 0] - total[:, :, -1]).max()
    )
    if float(furthest) <= LARGEST_EXPONENT:
        columns = (k * torch.exp(middle - total)).transpose(2, 3)
        scale = torch.exp(total - middle)
        return (k * scale) @ columns, ((q * scale) @ columns).tril()
    keys = torch.exp((total.unsqueeze(3) - total.unsqueeze(2)).clamp(max=0.0)) * k.unsqueeze(2)
    return (k.unsqueeze(3) * keys).sum(-1), (q.unsqueeze(3) * keys).sum(-1).tril()


def _chunks(rows: torch.Tensor) -> torch.Tensor:
    """[n, H, C, X] of rows [T, H, X]; the last chunk is filled with zeros, which neither decay nor write."""
    tokens = rows.shape[0]
    padded = functional.pad(rows, (0, 0, 0, 0, 0, -tokens % CHUNK))
    return padded.view(-1, CHUNK, *rows.shape[1:]).transpose(1, 2)
