"""The SiTU MLP on a CPU in fp32. Scope: any size. Layout: as `ops/situ_mlp.py`; `prepare` widens both weights
once.

Numerics: nothing rounded between the products. SiTU(g, u) = 100 tanh(g/4) sigmoid(g) tanh(u/25). Validation:
`tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["prepare", "situ_", "situ_mlp"]


def prepare(*, gate_up_weight: torch.Tensor, down_weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both weights in fp32."""
    return {"gate_up_weight": gate_up_weight.float(), "down_weight": down_weight.float()}


def situ_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiTU of fp32 gate and up; overwrites both."""
    sigmoid = torch.sigmoid(gate)
    return gate.div_(4.0).tanh_().mul_(sigmoid).mul_(up.div_(25.0).tanh_()).mul_(100.0)


def situ_mlp(
    *,
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    out: torch.Tensor,
    launches: torch.Tensor,
) -> None:
    """See `ops/situ_mlp.py`; weights are bf16, or fp32 from `prepare`."""
    count_launch(launches, "situ_mlp")
    both = torch.mm(x.float(), gate_up_weight.float().T)
    inter = both.shape[1] // 2
    out.copy_(torch.mm(situ_(both[:, :inter], both[:, inter:]), down_weight.float().T))
