"""Every order in which the steps of several ranks can run, each state visited once; or some orders of many
ranks, drawn at random.

A wait that no order ever ends is a deadlock: in the real world a hang, here an answer with the rank and the
step that wait. Loads no torch.
"""

import random
from collections import deque
from typing import NamedTuple

from harness.domain.collective_model import CollectiveModel, ModelState, Program

__all__ = ["MAX_STATES", "Exploration", "explore", "walk"]

MAX_STATES = 200_000
"""Above it the model is too large to be explored whole, and nothing is proved."""

REDRAW = 0.02
"""Chance at each step of a walk that the programs' rates change."""


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
            taken = (*path, f"{model.name_of(rank)} {step.label}")
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
            stuck = [
                f"{model.name_of(r)} at {ranks[r][p].label}"
                for r, p in enumerate(places)
                if p < len(ranks[r])
            ]
            return Exploration(len(seen), True, f"deadlock: {', '.join(stuck)} after {', '.join(path[-6:])}")
    return Exploration(len(seen), True, None)


def walk(model: CollectiveModel, ranks: tuple[Program, ...], seed: int) -> str | None:
    """What goes wrong in one order drawn by `seed`; None where nothing does, which proves little.

    Programs run at rates that differ a thousandfold and are drawn anew now and then, so that some are an
    epoch ahead and others late, as even odds would hardly ever make them.
    """
    rng = random.Random(seed)
    state, places = dict(model.start), [0] * len(ranks)
    open_ones = [r for r, program in enumerate(ranks) if program]
    rates: dict[int, float] = {}
    while open_ones:
        if not rates or rng.random() < REDRAW:
            rates = {r: 10.0 ** rng.uniform(-3, 0) for r in open_ones}
        ready = [r for r in open_ones if ranks[r][places[r]].may_run(state)]
        if not ready:
            stuck = [f"{model.name_of(r)} at {ranks[r][places[r]].label}" for r in open_ones[:4]]
            return f"deadlock: {', '.join(stuck)}"
        rank = rng.choices(ready, [rates[r] for r in ready])[0]
        step = ranks[rank][places[rank]]
        wrong = step.run(state)
        if wrong is not None:
            return f"{wrong} after {model.name_of(rank)} {step.label}"
        places[rank] += 1
        if places[rank] == len(ranks[rank]):
            open_ones.remove(rank)
    return None
