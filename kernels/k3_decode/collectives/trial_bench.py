"""What the trials of fused exchanges share: a group, inputs equal in every process, counts of wrong words."""

from collections.abc import Callable

import torch

from k3_decode.collectives.groups import ExchangeGroup

__all__ = ["TURNS", "Bench", "Case"]

TURNS = 4
"""Times that each case runs, so that both epochs and a re-armed slot of each are used."""


class Bench:
    """A group and what its cases share."""

    def __init__(self, group: ExchangeGroup, seed: int) -> None:
        self.group, self.device = group, group.mailboxes.device
        self.ranks, self.local = group.layout.ranks, group.local
        self.mine = slice(group.first_rank, group.first_rank + group.local)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.launches = torch.zeros(16, dtype=torch.int32, device=self.device)

    def bf16(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random values, the same in every process."""
        values = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return values.to(torch.bfloat16)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Where a result goes."""
        return torch.full(shape, -3.0, dtype=dtype, device=self.device)

    def differing(self, out: torch.Tensor, want: torch.Tensor) -> int:
        """Words that are not the same bits."""
        kind = torch.int16 if out.element_size() == 2 else torch.int32
        return int((out.contiguous().view(kind) != want.contiguous().view(kind)).sum())


Case = Callable[[Bench, int], int]
