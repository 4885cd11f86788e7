"""Router logits, latent and the shared expert's hidden values on a CPU, in fp32. Scope: any size. Layout: as
`ops/moe_front.py`; `prepare` widens the weights once. Numerics: exact products, fp32 sums, SiTU on unrounded
sums; latent and hidden are rounded once. Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch
from k3_decode.cpu.situ_mlp import situ_

__all__ = ["moe_front", "prepare"]


def prepare(
    *, router_weight: torch.Tensor, down_weight: torch.Tensor, gate_up_weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The weights in fp32."""
    return {
        "router_weight": router_weight.float(),
        "down_weight": down_weight.float(),
        "gate_up_weight": gate_up_weight.float(),
    }


def moe_front(
    *,
    x: torch.Tensor,
    router_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_weight: torch.Tensor,
    logits: torch.Tensor,
    latent: torch.Tensor,
    hidden: torch.Tensor,
    launches: torch.Tensor,
) -> None:
    """See `ops/moe_front.py`; weights are bf16, or fp32 from `prepare`."""
    count_launch(launches, "moe_front")
    wide = x.float()
    torch.mm(wide, router_weight.float().T, out=logits)
    latent.copy_(torch.mm(wide, down_weight.float().T))
    gate, up = torch.mm(wide, gate_up_weight.float().T).chunk(2, dim=-1)
    hidden.copy_(situ_(gate, up))
