"""Which of a context's tokens a rank keeps, where ranks divide the MLA cache (decode context parallelism).

Position p lies on rank (p // interleave) mod ranks, at place (p // (interleave * ranks)) * interleave +
p mod interleave of its share. A short context leaves ranks without tokens.
"""

from dataclasses import dataclass, replace

import torch

from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.state import StepInputs

__all__ = ["ContextShare", "shared_step"]


@dataclass(frozen=True, slots=True)
class ContextShare:
    """One rank's part of every context."""

    ranks: int
    rank: int
    interleave: int = 1
    """Consecutive positions that lie on one rank."""

    def count(self, length: torch.Tensor) -> torch.Tensor:
        """Of the first `length` positions, how many lie here."""
        turn = self.interleave * self.ranks
        rest = length % turn - self.rank * self.interleave
        return length // turn * self.interleave + rest.clamp(0, self.interleave)

    def is_here(self, position: torch.Tensor) -> torch.Tensor:
        """Whether a position lies on this rank."""
        return position // self.interleave % self.ranks == self.rank

    def place(self, position: torch.Tensor) -> torch.Tensor:
        """Where a position lies in its rank's share."""
        return position // (self.interleave * self.ranks) * self.interleave + position % self.interleave


def shared_step(step: StepInputs, share: ContextShare, block_table: torch.Tensor) -> StepInputs:
    """A step as the rank's MLA layers take it: the cache rows, lengths and slots of its share.

    `block_table` int32 [R, pages] holds the request's pages on this rank. Every row becomes a request of its
    own, as rows of one request see unlike numbers of the share's tokens; a row whose token lies on another
    rank has no slot.
    """
    rows = torch.arange(step.rows, device=step.lengths.device)
    visible = (step.lengths.long()[:, None] - step.rows + 1 + rows).flatten().clamp(min=0)
    table = block_table.repeat_interleave(step.rows, dim=0)
    newest = (visible - 1).clamp(min=0)
    place = share.place(newest)
    page = table.long().gather(1, (place // PAGE_SIZE).clamp(max=table.shape[1] - 1)[:, None])[:, 0]
    is_mine = share.is_here(newest) & (visible > 0) & (step.slot_mapping >= 0)
    slots = torch.where(is_mine, page * PAGE_SIZE + place % PAGE_SIZE, -1)
    return replace(step, slot_mapping=slots, block_table=table, lengths=share.count(visible).to(torch.int32))
