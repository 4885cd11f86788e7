"""The routed experts on a CPU: two products over all experts that the step touches, masked by the router's
weights.

Scope: any size; where the touched experts are many for the rows, each is multiplied with its own rows
instead. Layout: as `ops/experts.py`; `prepare` unpacks every expert to fp32 once and is for models whose
experts fit. Numerics: weights exact, fp32 sums and activations, nothing rounded between the products, one
rounding at the output. A NaN scale byte in an expert that any row of the step selects reaches every row.
Validation: `tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch
from k3_decode.cpu.situ_mlp import situ_
from k3_decode.shapes import MXFP4_GROUP
from k3_decode.tuned import choice

__all__ = ["experts", "prepare"]

MOST_WASTE = 8
"""Row-expert pairs computed for each one that counts, up to which two large products beat many small ones;
where no other number was measured.
"""


def prepare(
    *, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """fp32 experts [E, 2I, L] and [E, L, I]; the scales are in them."""
    first, second = unpack(w13, w13_scale), unpack(w2, w2_scale)
    return {"w13": first, "w13_scale": None, "w2": second, "w2_scale": None}


def experts(
    *,
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    out: torch.Tensor,
    launches: torch.Tensor,
) -> None:
    """See `ops/experts.py`; weights are packed, or fp32 from `prepare`."""
    count_launch(launches, "experts")
    touched, place = torch.unique(ids, return_inverse=True)
    skipped = int((touched < 0).sum())
    kept = touched[skipped:].long()
    if not len(kept):
        out.zero_()
        return
    first = w13[kept] if w13_scale is None else unpack(w13[kept], w13_scale[kept])
    second = w2[kept] if w2_scale is None else unpack(w2[kept], w2_scale[kept])
    shares = torch.zeros(ids.shape[0], len(touched)).scatter_add_(1, place, weights)[:, skipped:]
    wide = latent.float()
    if len(kept) <= _most_waste(w13.shape[0], ids) * ids.shape[1]:
        out.copy_(_all_at_once(wide, shares, first, second))
    else:
        out.copy_(_one_by_one(wide, shares, first, second))


def unpack(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values [..., K] of MXFP4 bytes [..., K/2] and scale bytes, by table."""
    values = _pair_table()[packed.long()].flatten(-2)
    factor = _scale_table()[scales.long()]
    return values.view(*scales.shape, MXFP4_GROUP).mul_(factor.unsqueeze(-1)).flatten(-2)


def _most_waste(experts: int, ids: torch.Tensor) -> int:
    tokens, top_k = ids.shape
    found = choice("cpu", "experts", {"experts": experts, "top_k": top_k, "tokens": tokens})
    return MOST_WASTE if found is None else found.values["most_waste"]


def _all_at_once(
    x: torch.Tensor, shares: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    count, double, latent = first.shape
    both = (x @ first.reshape(-1, latent).T).view(-1, count, double)
    hidden = situ_(both[..., : double // 2], both[..., double // 2 :])
    hidden = torch.where(shares.unsqueeze(-1) == 0, 0.0, hidden * shares.unsqueeze(-1))
    return hidden.flatten(1) @ second.transpose(1, 2).reshape(-1, latent)


def _one_by_one(
    x: torch.Tensor, shares: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    total = torch.zeros_like(x)
    half = first.shape[1] // 2
    for expert in range(first.shape[0]):
        rows = torch.nonzero(shares[:, expert]).squeeze(1)
        both = x[rows] @ first[expert].T
        hidden = situ_(both[:, :half], both[:, half:]).mul_(shares[rows, expert].unsqueeze(1))
        total.index_add_(0, rows, hidden @ second[expert].T)
    return total


def _pair_table() -> torch.Tensor:
    """[256, 2]: the two values of each byte, low nibble first."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def _scale_table() -> torch.Tensor:
    """[256]: the factor of each E8M0 byte."""
    factors = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).float()
    factors[255] = torch.nan
    return factors
