"""KDA's step on a CPU: one read and one write of the state a row.

Scope: any number of heads; gates for all rows at once, then request by request in place, which keeps a
state in the core's caches. Layout: as `ops/kda_step.py`; slots may be strided. Numerics: fp32 throughout.
With p = S (a k) and r = S (a q) from one product with the old state, the output is r + beta (v - p) (k . q)
and the state S a + beta (v - p) k^T: the decayed state is never formed before the update. Null requests are
left out. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch
from torch.nn import functional

from k3_decode.cpu.launches import count_launch

__all__ = ["kda_step"]

HEAD_DIM = 128
NORM_EPS_QK = 1e-6


def kda_step(
    *,
    packed: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor | None,
    rows: int,
    lower_bound: float | None,
    out: torch.Tensor,
    eps: float,
    launches: torch.Tensor,
) -> None:
    """See `ops/kda_step.py`."""
    count_launch(launches, "kda_step")
    live = torch.nonzero(slots[:, 0] > 0).squeeze(1)
    out.zero_()
    if not len(live):
        return
    heads = a_log.shape[0]
    width = HEAD_DIM * heads
    own = slots[live].long()
    home = own[:, 0]
    first = torch.zeros_like(home) if accepted is None else accepted[live].long() - 1
    step = packed.view(-1, rows, packed.shape[1])[live]

    window = conv_state[home[:, None], first[:, None] + torch.arange(3)]
    inputs = torch.cat((window, step[..., : 3 * width]), dim=1)
    taps = conv_weight.transpose(0, 1).reshape(4, -1)
    mixed = (inputs.unfold(1, 4, 1) * taps.T).sum(-1)
    mixed.mul_(torch.sigmoid(mixed))
    parts = mixed.view(-1, rows, 3, heads, HEAD_DIM)
    scales = torch.linalg.vector_norm(parts[:, :, :2], dim=-1, keepdim=True).square_()
    scales.add_(NORM_EPS_QK).rsqrt_()[:, :, 0].mul_(HEAD_DIM**-0.5)
    query, key = (parts[:, :, :2] * scales).unbind(2)
    value = parts[:, :, 2]
    low = step[..., 4 * width : 4 * width + HEAD_DIM].float()
    raw = (low @ decay_weight.float().T).add_(dt_bias)
    raw = raw.view(-1, rows, heads, HEAD_DIM)
    rate = a_log.exp().unsqueeze(1)
    if lower_bound is None:
        decay = functional.softplus(raw).mul_(-rate).exp_()
    else:
        decay = torch.sigmoid(raw.mul_(rate)).mul_(lower_bound).exp_()
    beta = torch.sigmoid(step[..., 4 * width + HEAD_DIM : 4 * width + HEAD_DIM + heads].float())
    gate = torch.sigmoid(step[..., 3 * width : 4 * width].float())
    overlap = (query * key).sum(-1, keepdim=True)

    probes = torch.stack((key, query), dim=-1).mul_(decay.unsqueeze(-1))
    reads = torch.empty(len(live), rows, heads, HEAD_DIM)
    for i, (targets, begin) in enumerate(zip(own.tolist(), first.tolist(), strict=True)):
        memory = state[targets[begin]]
        for t, slot in enumerate(targets):
            predicted, read = torch.bmm(memory, probes[i, t]).unbind(-1)
            update = (value[i, t] - predicted).mul_(beta[i, t].unsqueeze(1))
            torch.addcmul(read, update, overlap[i, t], out=reads[i, t])
            target = state[slot]
            torch.mul(memory, decay[i, t].unsqueeze(1), out=target)
            memory = target.addcmul_(update.unsqueeze(2), key[i, t].unsqueeze(1))
    roots = torch.linalg.vector_norm(reads, dim=-1, keepdim=True).square_().div_(HEAD_DIM).add_(eps).rsqrt_()
    gated = reads.mul_(roots).mul_(norm_weight).flatten(2).mul_(gate)
    target = (live[:, None] * rows + torch.arange(rows)).flatten()
    out[target] = gated.flatten(0, 1).to(torch.bfloat16)
    conv_state[home, : rows + 2] = inputs[:, 1:]
