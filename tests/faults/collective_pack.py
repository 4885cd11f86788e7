"""Collectives of two ranks as models, and a pack that brings one."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

from harness.domain.check import StageName
from harness.domain.collective_model import CollectiveModel, ModelState, Program, Step
from harness.domain.faults import Sighting
from harness.domain.pack import OpContract, Pack
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.faults.scenes import PackScene
from harness.stages import stage_of

__all__ = ["collective_fault", "flag_exchange", "lamport_rank"]

EPOCHS, STAGES = 4, 3


def lamport_rank(rank: int, clears_ahead: int) -> Program:
    """Lamport all-gather over three stages: each epoch write the peer's buffer, wait for one's own, read it,
    and clear the stage `clears_ahead` epochs on. A stage that is cleared too near is one that a faster peer
    has written already.
    """
    peer = 1 - rank
    steps: list[Step] = []
    for epoch in range(EPOCHS):
        stage = epoch % STAGES

        def write(state: ModelState, epoch: int = epoch, stage: int = stage) -> None:
            state[f"buffer{peer}.{stage}"] = epoch

        def is_there(state: ModelState, stage: int = stage) -> bool:
            return state[f"buffer{rank}.{stage}"] is not None

        def read(state: ModelState, epoch: int = epoch, stage: int = stage) -> str | None:
            seen = state[f"buffer{rank}.{stage}"]
            return None if seen == epoch else f"rank {rank} read epoch {seen} for {epoch}"

        def clear(state: ModelState, epoch: int = epoch) -> None:
            state[f"buffer{rank}.{(epoch + clears_ahead) % STAGES}"] = None

        steps += [
            Step(f"writes epoch {epoch}", write),
            Step(f"reads epoch {epoch}", read, is_there),
            Step(f"clears after epoch {epoch}", clear),
        ]
    return tuple(steps)


def flag_exchange(rank: int, order: str) -> Program:
    """Write the data, raise a flag for the peer, wait for the peer's flag, read its data; twice.

    `order` is `released` (data before flag, the flag holds the epoch), `flag_first`, or `shared_flag` (one
    bit that the reader takes back).
    """
    peer = 1 - rank
    steps: list[Step] = []
    for epoch in range(1, 3):

        def write(state: ModelState, epoch: int = epoch) -> None:
            state[f"data{rank}.{epoch % 2}"] = epoch

        def raise_flag(state: ModelState, epoch: int = epoch) -> None:
            state[f"flag{rank}"] = 1 if order == "shared_flag" else epoch

        def is_up(state: ModelState, epoch: int = epoch) -> bool:
            flag = int(state[f"flag{peer}"] or 0)
            return flag == 1 if order == "shared_flag" else flag >= epoch

        def read(state: ModelState, epoch: int = epoch) -> str | None:
            seen = state[f"data{peer}.{epoch % 2}"]
            return None if seen == epoch else f"rank {rank} read {seen} for epoch {epoch}"

        def take_back(state: ModelState) -> None:
            state[f"flag{peer}"] = 0

        first, second = Step(f"writes {epoch}", write), Step(f"raises its flag {epoch}", raise_flag)
        steps += [second, first] if order == "flag_first" else [first, second]
        steps.append(Step(f"reads {epoch}", read, is_up))
        if order == "shared_flag":
            steps.append(Step(f"takes the flag back {epoch}", take_back))
    return tuple(steps)


def collective_fault(
    name: str,
    *,
    title: str,
    report: str,
    fault: Callable[[int], Program],
    repaired: Callable[[int], Program],
    planted: Callable[[int], Program],
) -> Fault:
    """A fault in what each rank does; `planted` is the control that the pack brings beside it."""

    def make(folder: Path, is_repaired: bool) -> Pack:
        program = repaired if is_repaired else fault
        start: ModelState = {f"buffer{r}.{s}": None for r in (0, 1) for s in range(STAGES)}
        start |= {f"data{r}.{s}": None for r in (0, 1) for s in (0, 1)} | {f"flag{r}": 0 for r in (0, 1)}
        model = CollectiveModel("exchange", start, (program(0), program(1)), (planted(0), planted(1)))
        return cast("Pack", _CollectivePack(folder, model))

    return Fault(name, title, report, "collective", "kernels", PackScene(make, _look))


class _CollectivePack:
    """A pack with a collective and no ops."""

    name = "collectives"
    repository_prefix = "kernels/collectives/"
    smoke_model = claimed_model = "tiny"

    def __init__(self, root: Path, model: CollectiveModel) -> None:
        self.root, self._model = root, model

    def ops(self) -> tuple[OpContract, ...]:
        """None."""
        return ()

    def collective_models(self) -> tuple[CollectiveModel, ...]:
        """The one."""
        return (self._model,)


def _look(bench: Bench, pack: Pack) -> Iterable[Sighting]:
    request = replace(bench.request, pack=pack)
    return bench.run(stage_of(StageName.KERNELS).plan(request), request)
