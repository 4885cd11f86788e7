"""The drivers that answer a forward's meetings with exchange kernels, and nothing on the host: of one rank a
GPU, or of ranks that local slots of one GPU play.

Every answer is launched on the current stream, so a step that is driven so can be captured and replayed. A
real rank's answer lies where its part lay. All ranks must drive the same forward with groups that were made
together. What no mailbox holds (a prompt's rows, the head's logits) is answered by `beyond`, if there is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from k3_decode.collectives.groups import ExchangeGroup
from k3_decode.collectives.meetings import Collective, Exchange, combined, next_parts
from k3_decode.cute.exchange import exchange
from k3_decode.cute.exchange_parts import exchange_parts

__all__ = ["TWO_STAGE_ROWS", "Exchanged", "PlayedExchange"]

TWO_STAGE_ROWS = 32
"""Rows from which a sum goes by way of the columns' owners where there are more than two ranks; between two,
either form sends the same bytes, and one-shot waits once."""


@dataclass(slots=True)
class Exchanged:
    """One rank's meetings over its mailboxes."""

    group: ExchangeGroup
    launches: torch.Tensor
    beyond: Callable[[Collective], torch.Tensor] | None = None
    """Answers a meeting that mailboxes do not hold; None: there must be none."""
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
            if self.beyond is not None and not _fits(mine, self.group):
                answer = self.beyond(mine)
            else:
                answer = self._sum(mine.part) if mine.kind == "reduce" else self._gather(mine)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Added in place: the thread that sends a vector is the one that overwrites it."""
        exchange(
            part=part[None], out=part[None], launches=self.launches, form=_form(self.group, len(part)),
            **self.group.arguments(),
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


@dataclass(slots=True)
class PlayedExchange:
    """All ranks' meetings over the slots of one GPU. Parts are brought together and answers taken apart by
    copies, as each rank has buffers of its own; times say nothing.
    """

    group: ExchangeGroup
    launches: torch.Tensor
    _held: list[list[Collective]] = field(default_factory=list)

    def run(self, forwards: Sequence[Exchange]) -> list[torch.Tensor]:
        """Every rank's result; `RuntimeError` where ranks do not meet at the same places."""
        answers: list[torch.Tensor] | None = None
        while True:
            parts, results = next_parts(forwards, answers)
            if not parts:
                return results
            if not _fits(parts[0], self.group):
                answers = [combined(parts, rank) for rank in range(len(parts))]
            else:
                answers = self._sums(parts) if parts[0].kind == "reduce" else self._gathered(parts)

    def _sums(self, parts: list[Collective]) -> list[torch.Tensor]:
        every = torch.stack([one.part for one in parts])
        exchange(
            part=every, out=every, launches=self.launches, form=_form(self.group, every.shape[1]),
            **self.group.arguments(),
        )  # fmt: skip
        return list(every)

    def _gathered(self, parts: list[Collective]) -> list[torch.Tensor]:
        """Buffers of all ranks' columns; those of fp32 values are filled with the next ones of bf16."""
        wholes = [one.whole for one in parts if one.whole is not None]
        if parts[0].part.dtype == torch.float32:
            self._held.append(parts)
            return wholes
        ranks = len(parts)
        words = torch.stack([one.part.contiguous().view(torch.int32) for one in parts])[:, None]
        out = words.new_empty((ranks, ranks, *words.shape[2:]))
        extra = extra_out = None
        held = self._held.pop() if self._held else None
        if held is not None:
            extra = torch.stack([one.part.contiguous().view(torch.int32) for one in held])[:, None]
            extra_out = extra.new_empty((ranks, ranks, *extra.shape[2:]))
        exchange_parts(
            part=words, out=out, extra=extra, extra_out=extra_out, launches=self.launches,
            **self.group.arguments(),
        )  # fmt: skip
        for rank, whole in enumerate(wholes):
            _fill(whole, out[rank])
            if held is not None and extra_out is not None:
                mine = held[rank].whole
                assert mine is not None
                _fill(mine, extra_out[rank])
        return wholes


def _fill(whole: torch.Tensor, words: torch.Tensor) -> None:
    """[R, B, words] of all ranks side by side into a buffer [B, columns]."""
    whole.view(torch.int32).copy_(words.transpose(0, 1).flatten(1))


def _form(group: ExchangeGroup, rows: int) -> str:
    is_two_stage = group.layout.ranks > 2 and rows >= TWO_STAGE_ROWS
    return "two_stage" if is_two_stage else "one_shot"


def _fits(mine: Collective, group: ExchangeGroup) -> bool:
    """Whether the mailboxes hold a part, and an exchange serves it: columns of whole vectors for every rank,
    and of a gather a buffer to gather into.
    """
    columns, size = mine.part.shape[-1], mine.part.numel() * mine.part.element_size()
    if mine.kind == "reduce":
        return size <= group.layout.part_bytes and columns % (8 * group.layout.ranks) == 0
    return mine.kind == "gather" and size <= group.layout.part_bytes // 2 and mine.whole is not None
