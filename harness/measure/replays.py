"""What only a GPU has: captured graphs, and predecessors that are late.

Regimes: `graph0` to `graph2` replay one captured call on inputs that were changed in place; `turns0` and
`turns1` are two graphs of one op on buffers of their own, replayed in turn after a third; `jitter` is the
round of `measure.jitter` that came out most unlike a quiet run. All of them are judged against the oracle as
any other regime; `jitter` rows say how many elements of each round differ from the quiet run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.measure.jitter import chain_of, readers_differ, rounds_of
from harness.measure.tensors import Guarded, guard, same_bits
from harness.measure.trial import (
    LAUNCH_SLOTS,
    Pair,
    Result,
    Rows,
    Trial,
    fresh_arguments,
    poison_outputs,
    record,
    run_pair,
)

__all__ = ["REPLAYS", "captured", "try_replays"]

GRAPH_SHIFT, TURN_SHIFT = 2000, 4000
"""Offsets of seeds, so that inputs differ from every regime's."""
GRAPH_REPLAYS, TURNS = 3, 2
REPLAYS = ("graph0", "graph1", "graph2", "turns0", "turns1", "jitter")
"""Every regime of this module."""


def try_replays(trial: Trial, regime: str, pair: Pair, rows: Rows) -> None:
    """All regimes of this module, on the weights of `pair`."""
    _changed_inputs(trial, regime, pair.args, rows)
    _in_turns(trial, regime, pair.args, rows)
    _late_predecessor(trial, pair, rows)


@dataclass(frozen=True, slots=True)
class Captured:
    """A call as a CUDA graph. It holds the call, whose weights and workspaces the graph reads."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], object]

    def __call__(self) -> None:
        """Replay it."""
        self.graph.replay()


def captured(call: Callable[[], object]) -> Captured:
    """A call as a CUDA graph, warmed up first; an error inside the call comes out as it is."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            call()
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return Captured(graph, call)


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that the call has broken; that it cannot end well is no news."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


def _changed_inputs(trial: Trial, regime: str, args: dict[str, Any], rows: Rows) -> None:
    result, replay = _captured_call(trial, args)
    for number in range(GRAPH_REPLAYS):
        fresh = _refill(trial, regime, args, result, GRAPH_SHIFT + number)
        replay()
        trial.settle()
        record(trial, f"graph{number}", run_pair(trial, fresh, result), rows)


def _in_turns(trial: Trial, regime: str, args: dict[str, Any], rows: Rows) -> None:
    """Two graphs in turn: each must read its own buffers, whatever ran between."""
    made = [_captured_call(trial, args) for _ in range(TURNS)]
    fresh = [_refill(trial, regime, args, result, TURN_SHIFT + n) for n, (result, _) in enumerate(made)]
    for _, replay in reversed(made):
        replay()
    for number, (result, _) in enumerate(made):
        _refill(trial, regime, args, result, TURN_SHIFT + number)
    for _, replay in made:
        replay()
    trial.settle()
    for number, (result, _) in enumerate(made):
        record(trial, f"turns{number}", run_pair(trial, fresh[number], result), rows)


def _late_predecessor(trial: Trial, pair: Pair, rows: Rows) -> None:
    """The call behind a producer that is late, round after round; the worst round is judged."""
    guarded = guard(pair.args)
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=trial.device)
    call = trial.pack.bind_optimised(trial.op, trial.implementation, guarded.args, launches)
    late = [
        p.name for p in trial.of_role("activation")
        if isinstance(pair.args[p.name], torch.Tensor) and pair.args[p.name].dtype.is_floating_point
    ]  # fmt: skip
    chain = chain_of(guarded.buffers(late))
    turns = rounds_of(trial.seed)
    outputs = [p.name for p in trial.of_role("output") if isinstance(pair.args[p.name], torch.Tensor)]
    worst, kept = -1, dict[str, torch.Tensor]()
    for turn in turns:
        guarded.refill(pair.args, trial.weights)
        poison_outputs(trial, guarded)
        launches.zero_()
        chain.run(turn, call)
        guarded.remember_versions()
        total = 0
        for name in outputs:
            differing = same_bits(guarded.args[name], pair.optimised.guarded.args[name])
            total += differing
            rows.add(
                "jitter", "optimised", turn.number, turn.delay_us, turn.is_cold, turn.is_busy, name,
                guarded.args[name].numel(), differing,
            )  # fmt: skip
        if total > worst:
            worst, kept = total, _written(trial, guarded)
    for name, value in kept.items():
        guarded.args[name].copy_(value)
    record(trial, "jitter", run_pair(trial, pair.args, Result(guarded, launches)), rows)
    for reader, wrong in readers_differ(turns).items():
        for turn, differs in zip(turns, wrong, strict=True):
            rows.add(
                "jitter", reader, turn.number, turn.delay_us, turn.is_cold, turn.is_busy, "word", 1, differs
            )


def _captured_call(trial: Trial, args: dict[str, Any]) -> tuple[Result, Callable[[], None]]:
    """A captured call on guarded copies, and where its results come out."""
    guarded = guard(args)
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=trial.device)
    call = trial.pack.bind_optimised(trial.op, trial.implementation, guarded.args, launches)
    return Result(guarded, launches), captured(call)


def _refill(trial: Trial, regime: str, args: dict[str, Any], result: Result, shift: int) -> dict[str, Any]:
    """Other inputs in the buffers that a graph reads, and poison in its outputs."""
    fresh = fresh_arguments(trial, regime, args, shift)
    result.guarded.refill(fresh, trial.weights)
    result.launches.zero_()
    poison_outputs(trial, result.guarded)
    return fresh


def _written(trial: Trial, guarded: Guarded) -> dict[str, torch.Tensor]:
    """Copies of what a call writes."""
    names = [p.name for p in trial.of_role("output", "state")]
    return {n: guarded.args[n].clone() for n in names if isinstance(guarded.args[n], torch.Tensor)}
