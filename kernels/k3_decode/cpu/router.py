"""Expert selection on a CPU: a partial selection over integer keys that no two experts share.

Scope: fewer than 2^31 experts. Layout: as `ops/router.py`. Numerics: fp32 scores. A key holds the bits of
score + bias, made monotonic as an integer, above the expert's reversed id: so the largest k keys are the
right experts in the right order, ties included. NaN keys are -inf. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["router"]


def router(
    *,
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    launches: torch.Tensor,
) -> None:
    """See `ops/router.py`."""
    count_launch(launches, "router")
    experts, top_k = logits.shape[1], ids.shape[1]
    scores = torch.sigmoid(logits)
    merit = (scores + bias).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = merit.add_(0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) + torch.arange(experts - 1, -1, -1)
    best = torch.topk(keys, top_k, dim=1).values
    chosen = experts - 1 - (best & 0xFFFFFFFF)
    ids.copy_(chosen)
    picked = scores.gather(1, chosen).nan_to_num_(nan=0.0)
    weights.copy_(picked / picked.sum(1, keepdim=True).add_(1e-20) * scale)
