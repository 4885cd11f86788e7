"""The worker in which a Python candidate is timed: what it says is compared with a clock outside of it.

A window is a number of calls, each on inputs of its own. The parent says `arm` (inputs are made, untimed),
then `go`: the calls run, on a GPU as one captured graph, and the answer carries the worker's own time and the
digest of every output. So whatever is claimed, all the work that the outputs need lies between `go` and its
answer, where the parent's clock runs. `save` writes the outputs of the last window, which must have that
digest and be right. Arm `none` calls nothing: what the parent's clock shows for it is what a window costs.

Same process as the candidate: nothing here can be believed by itself. What is left to a candidate that reads
this process's memory is to begin during `arm`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, Pack
from harness.measure.reference import laid_out_weights
from harness.measure.tensor_files import flat_view, save_arguments
from harness.measure.tensors import poison
from harness.measure.trial import LAUNCH_SLOTS

__all__ = ["TimedWorker", "serve_windows"]


class TimedWorker:
    """One op in one cell, in both arms, window by window."""

    def __init__(self, pack: Pack, contract: OpContract, cell: Cell, model: str, implementation: str) -> None:
        self._pack, self._contract, self._cell = pack, contract, cell
        self._model, self._implementation = model, implementation
        self._device = "cpu" if cell.arch == "cpu" else "cuda"
        self._weights: dict[str, Any] | None = None
        self._units: list[tuple[dict[str, Any], Callable[[], object]]] = []
        self._work: Callable[[], object] = self._all_calls
        self.is_graph = self._device != "cpu"
        """Whether windows are captured graphs."""

    def arm(self, arm: str, regime: str, seeds: list[int]) -> None:
        """One call a seed: fresh inputs, poisoned outputs, and what is timed."""
        self._units = []
        if self._weights is None:
            self._weights = laid_out_weights(self._pack, self._contract, self._cell, self._model, regime)
        for seed in seeds:
            op = self._contract.name
            args = self._pack.make_args(op, self._cell, regime, seed, self._device, self._model)
            args |= self._weights
            for name in self._outputs(args):
                poison(args[name])
            self._units.append((args, self._call(arm, args)))
        self._settle()
        self._work = self._all_calls
        if self._device != "cpu" and arm != "none":
            try:
                self._work = self._captured()
            except RuntimeError:
                self.is_graph = False  # a call that waits for the device is timed as it is, and said to be
        self._settle()

    def go(self) -> tuple[float, str]:
        """Microseconds of a call, and the digest of what all of them left."""
        with torch.no_grad():
            begun = time.perf_counter_ns()
            self._work()
            self._settle()
            us = (time.perf_counter_ns() - begun) / 1e3 / len(self._units)
        return us, self._digest()

    def save(self, folder: Path) -> None:
        """The outputs of the last window, one folder a unit."""
        for number, (args, _) in enumerate(self._units):
            save_arguments({name: args[name] for name in self._outputs(args)}, folder / f"unit{number}")

    def _call(self, arm: str, args: dict[str, Any]) -> Callable[[], object]:
        if arm == "none":
            return lambda: None
        if arm == "stock":
            return partial(self._pack.run_stock, self._contract.name, args)
        launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=self._device)
        return self._pack.bind_optimised(self._contract.name, self._implementation, args, launches)

    def _all_calls(self) -> None:
        for _, call in self._units:
            call()

    def _captured(self) -> Callable[[], None]:
        """All calls as one graph, whose capture leaves states and outputs as they were armed."""
        from harness.measure.replays import captured

        kept = [
            (args, {n: v.clone() for n, v in args.items() if self._is_written(n)}) for args, _ in self._units
        ]
        replay = captured(self._all_calls)
        replay()  # the first replay of a graph also puts it on the device
        for args, before in kept:
            for name, value in before.items():
                args[name].copy_(value)
        return replay

    def _is_written(self, name: str) -> bool:
        return any(p.name == name and p.role in ("output", "state") for p in self._contract.parameters)

    def _digest(self) -> str:
        total = hashlib.sha256()
        for args, _ in self._units:
            for name in self._outputs(args):
                total.update(flat_view(args[name]).cpu().numpy().tobytes())
        return total.hexdigest()

    def _outputs(self, args: dict[str, Any]) -> Iterator[str]:
        for parameter in self._contract.parameters:
            if parameter.role == "output" and isinstance(args[parameter.name], torch.Tensor):
                yield parameter.name

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def serve_windows(worker: TimedWorker, lines: TextIO, answers: TextIO) -> None:
    """Answer `arm`, `go` and `save` requests, one JSON object a line, until the input closes."""
    for line in lines:
        asked = json.loads(line)
        answer: dict[str, Any] = {"did": asked["do"], "is_graph": worker.is_graph}
        if asked["do"] == "arm":
            worker.arm(asked["arm"], asked["regime"], asked["seeds"])
        elif asked["do"] == "go":
            answer["us"], answer["digest"] = worker.go()
        else:
            worker.save(Path(asked["folder"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def silence_output() -> TextIO:
    """Standard output for answers alone; what a candidate prints goes to standard error."""
    import os

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers
