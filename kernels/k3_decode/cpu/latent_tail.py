"""The MoE's end on a CPU: the norm's root multiplies the product, so that the latent is read once.

Scope: any size. Layout: as `ops/latent_tail.py`; `prepare` folds the norm's weight into the up-projection, in
fp32. Numerics: fp32, one rounding at the output. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["latent_tail", "prepare"]


def prepare(*, norm_weight: torch.Tensor, up_weight: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The up-projection with the norm's weight in its columns."""
    return {"norm_weight": None, "up_weight": up_weight.float() * norm_weight.float()}


def latent_tail(
    *,
    latent: torch.Tensor,
    norm_weight: torch.Tensor | None,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    launches: torch.Tensor,
) -> None:
    """See `ops/latent_tail.py`; weights as there, or from `prepare`."""
    count_launch(launches, "latent_tail")
    wide = latent.float()
    root = (
        torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(wide.shape[1]).add_(eps).rsqrt_()
    )
    weighted = wide if norm_weight is None else wide * norm_weight.float()
    out.copy_(torch.addcmul(shared.float(), torch.mm(weighted, up_weight.float().T), root))
