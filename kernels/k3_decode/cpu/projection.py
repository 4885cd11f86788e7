"""A linear map on a CPU in fp32. Scope: any size. Layout: as `ops/projection.py`; `prepare` widens the weight
once.

Numerics: exact fp32 products of bf16 values, fp32 sums, one rounding to the output's type. Validation:
`tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["prepare", "projection"]


def prepare(*, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight in fp32, as `projection` takes it too."""
    return {"weight": weight.float()}


def projection(*, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, launches: torch.Tensor) -> None:
    """See `ops/projection.py`; `weight` is bf16, or fp32 from `prepare`."""
    count_launch(launches, "projection")
    if out.dtype == torch.float32:
        torch.mm(x.float(), weight.float().T, out=out)
    else:
        out.copy_(torch.mm(x.float(), weight.float().T))
