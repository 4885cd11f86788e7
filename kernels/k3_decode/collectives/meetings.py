"""How tensor-parallel ranks combine their parts, as values that a forward yields and a driver answers.

A forward is a generator: it yields a `Collective` where ranks must meet and receives the combined tensor. So
the same code runs all ranks in one process, one rank of a slice that has no peers, or one rank a process. A
reduction adds bf16 parts in rank order in fp32 and rounds once, which makes the sum the same on every rank
and in every driver.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed

__all__ = [
    "Collective", "Exchange", "Meetings", "combined", "gather", "meet_distributed", "next_parts", "reduce",
    "run_alone", "run_distributed", "run_ranks", "transpose",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part of a meeting."""

    kind: Literal["reduce", "gather", "transpose"]
    """`reduce`: sum over ranks; `gather`: parts side by side along the last axis; `transpose`: of parts [R,
    ...] what every rank made for this one.
    """
    part: torch.Tensor
    whole: torch.Tensor | None = None
    """Of a gather whose part already lies in place among all ranks' parts: the buffer that holds them."""


Exchange = Generator[Collective, torch.Tensor, torch.Tensor]
"""A rank's forward: yields what it brings to each meeting, returns its result."""
Meetings = Generator[Collective, torch.Tensor, None]
"""A part of a forward that writes its result into buffers."""


def reduce(part: torch.Tensor, tp: int) -> Exchange:
    """The sum of all ranks' parts; the part itself where there is one rank."""
    if tp == 1:
        return part
    return (yield Collective("reduce", part))


def gather(part: torch.Tensor, tp: int, whole: torch.Tensor | None = None) -> Exchange:
    """All ranks' parts side by side; `whole` is the buffer in which the part lies in place, if there is."""
    if tp == 1:
        return part
    return (yield Collective("gather", part, whole))


def transpose(part: torch.Tensor, ranks: int) -> Exchange:
    """[R, ...]: of every rank what it made for this one, of parts [R, ...]; the part where there is one."""
    if ranks == 1:
        return part
    return (yield Collective("transpose", part))


def run_ranks(exchanges: Sequence[Exchange]) -> list[torch.Tensor]:
    """Runs ranks in lock step in this process and gives each one's result.

    Raises `RuntimeError` where ranks do not meet at the same places.
    """
    answers: list[torch.Tensor] | None = None
    while True:
        parts, results = next_parts(exchanges, answers)
        if not parts:
            return results
        if parts[0].kind == "transpose":
            answers = [combined(parts, rank) for rank in range(len(parts))]
        else:
            answers = [_combined(parts)] * len(exchanges)


def next_parts(
    exchanges: Sequence[Exchange], answers: Sequence[torch.Tensor] | None
) -> tuple[list[Collective], list[torch.Tensor]]:
    """What every rank brings to the next meeting, or every rank's result; `answers`: of the last meeting.

    Raises `RuntimeError` where ranks do not meet at the same places.
    """
    parts: list[Collective] = []
    results: list[torch.Tensor] = []
    for rank, exchange in enumerate(exchanges):
        try:
            parts.append(next(exchange) if answers is None else exchange.send(answers[rank]))
        except StopIteration as end:
            results.append(end.value)
    if parts and (results or len({part.kind for part in parts}) != 1):
        raise RuntimeError("ranks do not meet: some have finished, or they ask for unlike collectives")
    return parts, results


def run_alone(exchange: Exchange) -> torch.Tensor:
    """Runs one rank without its peers, for a slice of a model.

    A reduction gives the rank's own part, and a gather the buffer as it is, where the peers' parts are what
    was last put there.
    """
    answer: torch.Tensor | None = None
    while True:
        try:
            mine = next(exchange) if answer is None else exchange.send(answer)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
        answer = mine.part if mine.whole is None else mine.whole


def run_distributed(exchange: Exchange) -> torch.Tensor:
    """Runs this process's rank; the meetings go through torch.distributed's default group."""
    answer: torch.Tensor | None = None
    while True:
        try:
            mine = next(exchange) if answer is None else exchange.send(answer)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
        answer = meet_distributed(mine)


def meet_distributed(mine: Collective, group: Any = None) -> torch.Tensor:
    """This rank's answer of one meeting over a group of torch.distributed, by default all processes."""
    part = mine.part.contiguous()
    parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, part, group=group)
    met = [Collective(mine.kind, other) for other in parts]
    return combined(met, distributed.get_rank(group))


def combined(parts: Sequence[Collective], rank: int) -> torch.Tensor:
    """What one rank gets of a meeting."""
    if parts[0].kind == "transpose":
        return torch.stack([one.part[rank] for one in parts])
    return _combined(parts)


def _combined(parts: Sequence[Collective]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0].part
    if parts[0].kind == "gather":
        return torch.cat([part.part for part in parts], dim=-1)
    total = parts[0].part.float()
    for part in parts[1:]:
        total = total + part.part.float()
    return total.to(parts[0].part.dtype)
