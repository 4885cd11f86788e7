"""Kimi Delta Attention for the rows of one decode or verify step: convolution, gates, delta rule, gated norm.

Per request the rows are taken in order. For row t and each head, with the four newest conv inputs per
channel:
  u = w0 s0 + w1 s1 + w2 s2 + w3 x;  y = u sigmoid(u);  q, k, v = split(y)
  q = q / sqrt(|q|^2 + 1e-6) / sqrt(128);  k = k / sqrt(|k|^2 + 1e-6);  beta = sigmoid(beta_raw)
  g = bound sigmoid(exp(a_log) (f_a @ decay_weight.T + dt_bias)); with bound None: -exp(a_log) softplus(...)
  S <- S exp(g);  S <- S + beta (v - S k) k^T;  o = S q
  out = o / sqrt(mean(o^2) + eps) * norm_weight * sigmoid(g_out)

The first row reads the state in `slots[r, accepted[r] - 1]` and taps of the conv window of `slots[r, 0]` from
entry `accepted[r] - 1` (entry 0, and slot `slots[r, 0]`, where `accepted` is None). The state after row t
goes to `slots[r, t]`. Entries 0 to rows + 1 of the window become the two newest accepted inputs and this
step's rows, bit for bit; later entries are kept. A request whose `slots[r, 0]` is 0 or less is null as a
whole: its outputs are zeros, whatever its rows hold, and nothing is written. A live request has no null slot
among its rows, and no two requests share a slot.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import (
    BASE_REGIMES,
    NEAR_OVERFLOW_OF_SQUARES,
    activation,
    poisoned,
    require_regime,
    uniform,
    weight,
    with_row_gap,
    with_special_rows,
)
from k3_decode.ops.products import linear

__all__ = ["HEAD_DIM", "NORM_EPS_QK", "SPEC", "log_decay", "oracle", "stock"]

REGIMES = (
    *BASE_REGIMES,
    "null_slots",
    "permuted_slots",
    "strided_slots",
    "strided_rows",
    "partly_accepted",
    "long_memory",
    "short_memory",
    "near_overflow",
    "special_rows",
)
HEAD_DIM = 128
NORM_EPS_QK = 1e-6
"""Inside the root of the query's and the key's normalisation."""


def log_decay(
    raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """fp32 log-decay [..., H, 128] of raw decay logits [..., H * 128]."""
    rate = a_log.exp().unsqueeze(-1)
    shifted = (raw.float() + dt_bias).reshape(*raw.shape[:-1], a_log.shape[0], HEAD_DIM)
    if lower_bound is None:
        return -rate * functional.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def stock(
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
) -> None:
    """fp32 from the convolution to the gated norm, as the fused stock kernel; only the decay logits are
    rounded to bf16.
    """
    heads = a_log.shape[0]
    width = HEAD_DIM * heads
    live = torch.nonzero(slots[:, 0] > 0).squeeze(1)
    out.zero_()
    step = packed.reshape(-1, rows, packed.shape[1])[live]
    own = slots[live].long()
    home = own[:, 0]
    first = torch.zeros_like(home) if accepted is None else accepted[live].long() - 1

    window = conv_state[home[:, None], first[:, None] + torch.arange(3, device=packed.device)]
    inputs = torch.cat((window, step[:, :, : 3 * width]), dim=1)
    taps = conv_weight.permute(1, 0, 2).reshape(4, 3 * width)
    convolved = sum(
        (inputs[:, j : j + rows].float() * taps[j] for j in range(1, 4)), inputs[:, :rows].float() * taps[0]
    )
    q, k, v = functional.silu(convolved).view(len(live), rows, 3, heads, HEAD_DIM).unbind(2)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + NORM_EPS_QK) * HEAD_DIM**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + NORM_EPS_QK)
    raw_decay = linear(step[:, :, 4 * width : 4 * width + HEAD_DIM], decay_weight)
    decay = log_decay(raw_decay, a_log, dt_bias, lower_bound).exp()
    beta = torch.sigmoid(step[:, :, 4 * width + HEAD_DIM : 4 * width + HEAD_DIM + heads].float())
    gate = torch.sigmoid(step[:, :, 3 * width : 4 * width].float())

    memory = state[own.gather(1, first[:, None])[:, 0]]
    for t in range(rows):
        memory.mul_(decay[:, t, :, None, :])
        error = v[:, t] - torch.einsum("rhvk,rhk->rhv", memory, k[:, t])
        memory.addcmul_((beta[:, t, :, None] * error)[..., None], k[:, t, :, None, :])
        read = torch.einsum("rhvk,rhk->rhv", memory, q[:, t])
        normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + eps) * norm_weight
        out[live * rows + t] = (normed.flatten(1) * gate[:, t]).to(torch.bfloat16)
        state[own[:, t]] = memory
    conv_state[home, : rows + 2] = inputs[:, 1:]


def oracle(
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
    eps: float,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64, one request and one row at a time; the conv state is exact."""
    heads = a_log.shape[0]
    width = HEAD_DIM * heads
    new_state, new_conv = state.double().clone(), conv_state.clone()
    out = torch.zeros(packed.shape[0], width, dtype=torch.float64, device=packed.device)
    for request, own_slots in enumerate(slots.tolist()):
        if own_slots[0] <= 0:
            continue
        first = 0 if accepted is None else int(accepted[request]) - 1
        inputs = list(conv_state[own_slots[0], first : first + 3])
        memory = state[own_slots[first]].double()
        for t in range(rows):
            row = packed[request * rows + t]
            inputs.append(row[: 3 * width])
            memory, read = _one_row(
                inputs[-4:], row, memory, conv_weight, decay_weight, a_log, dt_bias, lower_bound
            )
            new_state[own_slots[t]] = memory
            root = torch.sqrt((read * read).mean(dim=1, keepdim=True) + eps)
            normed = (read / root * norm_weight.double()).flatten()
            out[request * rows + t] = normed * _sigmoid(row[3 * width : 4 * width].double())
        for entry, value in enumerate(inputs[1:]):
            new_conv[own_slots[0], entry] = value
    return {"conv_state": new_conv, "state": new_state, "out": out}


def _one_row(
    inputs: list[torch.Tensor],
    row: torch.Tensor,
    memory: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State [H,V,K] after one row, and what its query reads [H,V], in float64."""
    heads = a_log.shape[0]
    width = HEAD_DIM * heads
    u = torch.zeros(3 * width, dtype=torch.float64, device=row.device)
    for tap, value in enumerate(inputs):
        u += conv_weight[:, tap].double().flatten() * value.double()
    q, k, v = (u * _sigmoid(u)).view(3, heads, HEAD_DIM)
    q = q / torch.sqrt((q * q).sum(1, keepdim=True) + 1e-6) / HEAD_DIM**0.5
    k = k / torch.sqrt((k * k).sum(1, keepdim=True) + 1e-6)
    beta = _sigmoid(row[4 * width + HEAD_DIM : 4 * width + HEAD_DIM + heads].double())
    shifted = decay_weight.double() @ row[4 * width : 4 * width + HEAD_DIM].double() + dt_bias.double()
    rate = torch.exp(a_log.double())[:, None]
    if lower_bound is None:
        g = -rate * torch.logaddexp(shifted, torch.zeros_like(shifted)).view(heads, HEAD_DIM)
    else:
        g = lower_bound * _sigmoid(rate * shifted.view(heads, HEAD_DIM))
    decayed = memory * torch.exp(g)[:, None, :]
    predicted = torch.einsum("hvk,hk->hv", decayed, k)
    memory = decayed + torch.einsum("h,hv,hk->hvk", beta, v - predicted, k)
    return memory, torch.einsum("hvk,hk->hv", memory, q)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def touched(
    *, conv_state: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, rows: int, **_: object
) -> Mapping[str, torch.Tensor]:
    """Live requests' slots, and the rewritten entries of their windows."""
    conv_mask = torch.zeros(conv_state.shape, dtype=torch.bool, device=state.device)
    state_mask = torch.zeros(state.shape, dtype=torch.bool, device=state.device)
    for own_slots in slots.tolist():
        if own_slots[0] > 0:
            conv_mask[own_slots[0], : rows + 2] = True
            state_mask[own_slots] = True
    return {"conv_state": conv_mask, "state": state_mask}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Arguments over a pool with two slots more than the step needs, the null slot beside them."""
    require_regime("kda_step", REGIMES, regime)
    shapes, rows = cell.shapes, cell.rows
    heads, width = shapes.heads, shapes.channels
    slots = _slots(cell, regime, generator)
    pool = cell.tokens + 3
    packed = activation(
        regime, (cell.tokens, shapes.kda_in_rows), generator, device, tiny=1e-12, source="kda_step.packed"
    )
    if regime == "null_slots":
        packed.view(cell.requests, rows, -1)[slots[:, 0].to(device) <= 0] = torch.nan
    if regime == "near_overflow":
        packed = (packed.float() * NEAR_OVERFLOW_OF_SQUARES).to(packed.dtype)
    if regime == "special_rows":
        packed = with_special_rows(packed)
    state_scale = {"large": "large", "tiny": "tiny"}.get(regime, "gaussian")
    conv_state = activation(state_scale, (pool, rows + 2, 3 * width), generator, device, tiny=1e-12)
    memory_shape = (pool, heads, HEAD_DIM, HEAD_DIM)
    state = activation(state_scale, memory_shape, generator, device, tiny=1e-18, dtype=torch.float32) * 0.1
    if regime == "strided_slots":
        conv_state, state = _padded_slots(conv_state), _padded_slots(state)
    low, high = {"long_memory": (-12.0, -8.0), "short_memory": (2.0, 6.0)}.get(regime, (-9.0, -2.0))
    accepted = torch.full((cell.requests,), rows, dtype=torch.int32)
    if regime == "partly_accepted":
        accepted = torch.randint(1, rows + 1, (cell.requests,), generator=generator, dtype=torch.int32)
    return {
        "packed": with_row_gap(packed) if regime == "strided_rows" else packed,
        "conv_weight": weight((3, 4, width), generator, device, scale=0.5, dtype=torch.float32),
        "decay_weight": weight((width, HEAD_DIM), generator, device),
        "a_log": uniform((heads,), -1.0, 1.0, generator, device),
        "dt_bias": uniform((width,), low, high, generator, device),
        "norm_weight": weight((HEAD_DIM,), generator, device, scale=0.2, dtype=torch.float32) + 1.0,
        "conv_state": conv_state,
        "state": state,
        "slots": slots.to(device),
        "accepted": None if rows == 1 else accepted.to(device),
        "rows": rows,
        "lower_bound": shapes.model.decay_lower_bound,
        "out": poisoned((cell.tokens, width), device),
        "eps": shapes.model.norm_eps,
    }


def _slots(cell: Cell, regime: str, generator: torch.Generator) -> torch.Tensor:
    """Slot of every row, int32 [R, rows]; `null_slots` makes every third request null, and the last where
    there are three.
    """
    order = torch.arange(cell.tokens)
    if regime in ("permuted_slots", "partly_accepted"):
        order = torch.randperm(cell.tokens, generator=generator)
    slots = (order + 1).to(torch.int32).view(cell.requests, cell.rows)
    if regime == "null_slots":
        slots[min(1, cell.requests - 1) :: 3] = 0
        if cell.requests > 2:
            slots[-1] = -1
    return slots


def _padded_slots(pool: torch.Tensor) -> torch.Tensor:
    """The same pool with 256 elements of NaN after each slot, as when several layers' states share a page."""
    size = pool[0].numel()
    page = poisoned((pool.shape[0], size + 256), pool.device, pool.dtype)
    page[:, :size] = pool.flatten(1)
    return page[:, :size].view(pool.shape)


SPEC = OpSpec(
    name="kda_step",
    params=(
        Param("packed", Role.ACTIVATION),
        Param("conv_weight", Role.WEIGHT),
        Param("decay_weight", Role.WEIGHT),
        Param("a_log", Role.WEIGHT),
        Param("dt_bias", Role.WEIGHT),
        Param("norm_weight", Role.WEIGHT),
        Param("conv_state", Role.STATE, is_exact=True, token_axis=None),
        Param("state", Role.STATE, token_axis=None),
        Param("slots", Role.INDEX),
        Param("accepted", Role.INDEX),
        Param("rows", Role.SCALAR),
        Param("lower_bound", Role.SCALAR),
        Param("out", Role.OUTPUT),
        Param("eps", Role.SCALAR),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
    touched=from_args(touched),
)
