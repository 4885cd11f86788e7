"""MLA's end on a CPU: merge, value product and gate in fp32.

Scope: any number of shards; one shard is not merged at all. Layout: as `ops/mla_value.py`; `prepare` widens
the weight once. Numerics: fp32 merge; the value is rounded to bf16 before the gate, as the formula says, and
the output once. Validation: `tests/k3_decode/test_ops.py`.
"""

import math

import torch

from k3_decode.cpu.launches import count_launch
from k3_decode.ops.log_base import LogBase

__all__ = ["mla_value", "prepare"]


def prepare(*, uv_weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight in fp32."""
    return {"uv_weight": uv_weight.float()}


def mla_value(
    *,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    uv_weight: torch.Tensor,
    gate: torch.Tensor,
    lse_base: LogBase,
    out: torch.Tensor,
    launches: torch.Tensor,
) -> None:
    """See `ops/mla_value.py`; the weight is bf16, or fp32 from `prepare`."""
    count_launch(launches, "mla_value")
    has_keys = torch.isfinite(partial_lse)
    if partial.shape[0] == 1:
        latent = torch.where(has_keys[0].unsqueeze(-1), partial[0].float(), 0.0)
    else:
        logits = torch.where(has_keys, partial_lse, -torch.inf) * math.log(LogBase(lse_base))
        shares = torch.softmax(logits, dim=0).nan_to_num_(nan=0.0).unsqueeze(-1)
        latent = (torch.where(has_keys.unsqueeze(-1), partial.float(), 0.0) * shares).sum(0)
    value = torch.bmm(latent.transpose(0, 1), uv_weight.float()).transpose(0, 1)
    rounded = value.to(torch.bfloat16).float().reshape(out.shape)
    out.copy_(rounded.mul_(torch.sigmoid(gate.float())))
