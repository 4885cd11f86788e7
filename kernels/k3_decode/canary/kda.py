"""The KDA recurrence over whole sequences, for training: fla's chunked kernel, and a naive loop to check it
and to run on a CPU."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["check_chunked", "chunked", "naive"]

_LOWER_BOUND = -5.0


def naive(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """Outputs [B, T, H, 128] of q, k, v, raw decay [B, T, H, 128] and raw beta [B, T, H], from a zero
    state."""
    rows, length, heads, width = q.shape
    q, k, v = q.float(), k.float(), v.float()
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * width**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    log_decay = _LOWER_BOUND * torch.sigmoid(
        a_log.exp()[:, None] * (decay.float() + dt_bias.view(heads, width))
    )
    kept, strength = log_decay.exp(), torch.sigmoid(beta.float())
    state = torch.zeros(rows, heads, width, width, device=q.device)
    outputs = []
    for t in range(length):
        state = state * kept[:, t, :, None, :]
        change = v[:, t] - (state * k[:, t, :, None, :]).sum(-1)
        state = state + (strength[:, t, :, None] * change)[..., None] * k[:, t, :, None, :]
        outputs.append((state * q[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, 1)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """The same through `fla.ops.kda.chunk_kda` (CUDA, bf16), with gradients."""
    chunk_kda = _load_chunk_kda()
    out: Tensor = chunk_kda(
        q,
        k,
        v,
        decay,
        beta,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=_LOWER_BOUND,
        A_log=a_log,
        dt_bias=dt_bias,
    )[0]
    return out


def check_chunked() -> dict[str, float]:
    """Relative errors of `chunked` against `naive` on the GPU, output and gradients; raises when one is
    above 8 %."""
    torch.manual_seed(0)
    q, k, v, decay = (torch.randn(2, 192, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(2, 192, 2, device="cuda", dtype=torch.bfloat16)
    a_log, dt_bias = torch.zeros(2, device="cuda"), torch.empty(256, device="cuda").uniform_(-9, -2)
    results = []
    for recurrence in (chunked, naive):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, decay, beta, a_log, dt_bias)]
        out = recurrence(*inputs)
        (out.float() * v.float().roll(1, 1)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [t.grad.float() for t in inputs if t.grad is not None]
        results.append([out.detach().float(), *gradients])
    names = ("out", "q", "k", "v", "decay", "beta", "a_log", "dt_bias")
    errors = {
        n: round(float((a - b).norm() / (b.norm() + 1e-9)), 5)
        for n, a, b in zip(names, *results, strict=True)
    }
    bad = {n: e for n, e in errors.items() if not e < 0.08}
    if bad:
        raise RuntimeError(f"fla's chunked KDA differs from the naive recurrence: {bad}; use fla-core 0.6.0")
    return errors


def _load_chunk_kda() -> Any:
    """fla's kernel, with every autotuner cut to one configuration: tuning would take longer than training."""
    from triton.runtime import autotuner  # type: ignore[import-not-found, unused-ignore]

    if not getattr(autotuner.Autotuner, "_is_trimmed", False):
        original = autotuner.Autotuner.__init__

        def trimmed(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
            chosen = [min(configs, key=_distance_from_middle)] if configs and len(configs) > 1 else configs
            original(self, fn, names, chosen, *args, **kwargs)

        autotuner.Autotuner.__init__ = trimmed
        autotuner.Autotuner._is_trimmed = True
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found, unused-ignore]

    return chunk_kda


def _distance_from_middle(config: Any) -> tuple[int, ...]:
    """Four warps, two stages, blocks of 64: what ran well on an H200."""
    blocks = (abs(x - 64) for x in config.kwargs.values() if isinstance(x, int))
    return (abs(config.num_warps - 4), abs(config.num_stages - 2), *blocks)
