"""Every order in which the steps of several ranks can run, each state visited once.

A wait that no order ever ends is a deadlock: in the real world a hang, here an answer with the rank and the
step that wait. Loads no torch.
"""

from collections import deque
from typing import NamedTuple

from harness.domain.collective_model import CollectiveModel, ModelState, Program

__all__ = ["MAX_STATES", "Exploration", "explore"]

MAX_STATES = 200_000
"""Above it the model is too large to be explored whole, and nothing is proved."""


class Exploration(NamedTuple):
    """What all orders gave."""

    states: int
    is_complete: bool
    fault: str | None
    """The first thing that went wrong, on a shortest order, with the steps that led to it."""


def explore(model: CollectiveModel, ranks: tuple[Program, ...]) -> Exploration:
    """Try every order of the ranks' steps, breadth first, until one goes wrong or none is left."""
    first = (tuple(0 for _ in ranks), tuple(sorted(model.start.items())))
    seen = {first}
    waiting: deque[tuple[tuple[tuple[int, ...], tuple[tuple[str, object], ...]], tuple[str, ...]]] = deque()
    waiting.append((first, ()))
    while waiting:
        (places, frozen), path = waiting.popleft()
        ran = False
        for rank, place in enumerate(places):
            if place == len(ranks[rank]):
                continue
            step = ranks[rank][place]
            state: ModelState = dict(frozen)  # type: ignore[arg-type]  # frozen from a ModelState
            if not step.may_run(state):
                continue
            ran = True
            taken = (*path, f"rank {rank} {step.label}")
            wrong = step.run(state)
            if wrong is not None:
                return Exploration(len(seen), True, f"{wrong} after {', '.join(taken[-6:])}")
            moved = (*places[:rank], place + 1, *places[rank + 1 :])
            after = (moved, tuple(sorted(state.items())))
            if after not in seen:
                if len(seen) >= MAX_STATES:
                    return Exploration(len(seen), False, None)
                seen.add(after)
                waiting.append((after, taken))
        if not ran and any(place < len(ranks[rank]) for rank, place in enumerate(places)):
            stuck = [f"rank {r} at {ranks[r][p].label}" for r, p in enumerate(places) if p < len(ranks[r])]
            return Exploration(len(seen), True, f"deadlock: {', '.join(stuck)} after {', '.join(path[-6:])}")
    return Exploration(len(seen), True, None)
