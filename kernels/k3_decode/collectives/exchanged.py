"""The driver that answers a forward's meetings with exchange kernels: one rank a GPU, nothing on the host.

Every answer is launched on the current stream and lies where the part lay, so a step that is driven so can be
captured and replayed. All ranks must drive the same forward with groups that were made together.
"""

from dataclasses import dataclass, field

import torch

from k3_decode.collectives.groups import ExchangeGroup
from k3_decode.collectives.meetings import Collective, Exchange
from k3_decode.cute.exchange import exchange
from k3_decode.cute.exchange_parts import exchange_parts

__all__ = ["TWO_STAGE_ROWS", "Exchanged"]

TWO_STAGE_ROWS = 32
"""Rows from which a sum goes by way of the columns' owners where there are more than two ranks; between two,
either form sends the same bytes, and one-shot waits once."""


@dataclass(slots=True)
class Exchanged:
    """One rank's meetings over its mailboxes."""

    group: ExchangeGroup
    launches: torch.Tensor
    _held: list[Collective] = field(default_factory=list)
    """A gather of fp32 values that waits for the next one of bf16, to go with it in one launch."""

    def run(self, forward: Exchange) -> torch.Tensor:
        """The forward's result; `ValueError` at a meeting that no exchange serves."""
        answer: torch.Tensor | None = None
        while True:
            try:
                mine = next(forward) if answer is None else forward.send(answer)
            except StopIteration as end:
                if self._held:
                    raise ValueError("a gather of fp32 values had no bf16 gather to go with") from None
                result: torch.Tensor = end.value
                return result
            answer = self._sum(mine.part) if mine.kind == "reduce" else self._gather(mine)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Added in place: the thread that sends a vector is the one that overwrites it."""
        ranks = self.group.layout.ranks
        is_two_stage = ranks > 2 and len(part) >= TWO_STAGE_ROWS
        exchange(
            part=part[None], out=part[None], launches=self.launches,
            form="two_stage" if is_two_stage else "one_shot", **self.group.arguments(),
        )  # fmt: skip
        return part

    def _gather(self, mine: Collective) -> torch.Tensor:
        """Into the buffer that holds all ranks' columns; one of fp32 values is launched with the next."""
        if mine.whole is None:
            raise ValueError(
                f"a gather of {tuple(mine.part.shape)} has no buffer that holds all ranks' parts"
            )
        if mine.part.dtype == torch.float32:
            self._held.append(mine)
            return mine.whole
        extra_out = self._places(self._held[0].whole) if self._held else None
        out, rank = self._places(mine.whole), slice(self.group.first_rank, self.group.first_rank + 1)
        exchange_parts(
            part=out[:, rank], out=out, extra=None if extra_out is None else extra_out[:, rank],
            extra_out=extra_out, launches=self.launches, **self.group.arguments(),
        )  # fmt: skip
        self._held.clear()
        return mine.whole

    def _places(self, whole: torch.Tensor | None) -> torch.Tensor:
        """int32 [1, R, B, words]: each rank's columns of a buffer [B, columns]."""
        assert whole is not None
        words = whole.view(torch.int32)
        return words.view(len(words), self.group.layout.ranks, -1).transpose(0, 1)[None]
