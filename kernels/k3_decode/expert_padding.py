"""An expert shard's padding, which vLLM's layout has and the fused experts do without.

K3's experts are 3072 wide; a sixteenth is 192 columns, which `weights` pads to 256 for stock's kernels. Zero
rows of gate and up give hidden values of zero, so neither they nor their columns of w2 change a sum.
"""

import torch

__all__ = ["without_padding"]


def without_padding(weights: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """w13, w2 and their scales at `width` columns a half, where all that lies beyond is zero; else as given.

    `w13` [E,2I,L/2] holds gate rows, then up rows; `w2` [E,L,I/2]. At load time.
    """
    w13, w2 = weights["w13"], weights["w2"]
    padded = w13.shape[1] // 2
    if width >= padded or bool((_halves(w13)[:, :, width:] & 0x77).any()):
        return weights
    return {
        "w13": _cut_halves(w13, width),
        "w13_scale": _cut_halves(weights["w13_scale"], width),
        "w2": w2[..., : w2.shape[2] * width // padded].contiguous(),
        "w2_scale": weights["w2_scale"][..., : weights["w2_scale"].shape[2] * width // padded].contiguous(),
    }


def _cut_halves(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` rows of gate and of up."""
    return _halves(rows)[:, :, :width].flatten(1, 2)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """[E, gate or up, rows of it, columns]."""
    return rows.view(rows.shape[0], 2, -1, rows.shape[2])
