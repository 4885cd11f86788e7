"""Muon for the canary's matrices: momentum, orthogonalised by five Newton-Schulz steps (Jordan et al., 2024).

Matrices of one shape (either way round) are stacked into one batched product. State is static, so that a
step can be captured in a CUDA graph; the learning rate is a device scalar.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Muon"]

_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Quintic coefficients of the Muon reference: they push singular values near 1 in five steps."""


class Muon:
    """Steps `parameters` (2-D, or 3-D: one matrix per leading index); owns their momentum."""

    def __init__(
        self, parameters: Iterable[Tensor], rate: Tensor, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        self.rate, self.momentum, self.decay = rate, momentum, decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for p in parameters:
            low, high = sorted(p.shape[-2:])
            self.groups.setdefault((low, high), []).append(p)
        self.state = {
            key: torch.zeros(sum(_count(p) for p in members), *key, device=rate.device)
            for key, members in self.groups.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' gradients; update size 0.2 sqrt(longer side) x rate."""
        for key, members in self.groups.items():
            gradient = torch.cat([_oriented(p, _gradient(p), key) for p in members])
            held = self.state[key]
            held.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
            x = gradient * (1 - self.momentum) + held * self.momentum
            update = _orthogonalised(x) * (self.rate * 0.2 * math.sqrt(key[1]))
            start = 0
            for p in members:
                n = _count(p)
                change = _oriented(p, update[start : start + n], key)
                start += n
                p.mul_(1 - self.rate * self.decay).sub_(change.reshape(p.shape))


def _orthogonalised(x: Tensor) -> Tensor:
    a, b, c = _NEWTON_SCHULZ
    x = x.to(torch.bfloat16) if x.is_cuda else x
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None].to(x.dtype) + 1e-12)
    for _ in range(5):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x.float()


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _count(p: Tensor) -> int:
    return p.shape[0] if p.ndim == 3 else 1


def _oriented(p: Tensor, x: Tensor, key: tuple[int, int]) -> Tensor:
    """`x` as [n, *], turned between the parameter's orientation and `key`'s; its own inverse."""
    x = x if x.ndim == 3 else x[None]
    return x if tuple(p.shape[-2:]) == key else x.transpose(1, 2)
