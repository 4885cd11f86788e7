"""Optimised steps captured as CUDA graphs, one for each (requests, rows), and replayed on static inputs.

Inputs are copied into buffers that the graph reads; a step's shape never depends on what requests hold, as
the block table is as wide as the longest context. Capture runs one warm-up step whose rows are all null, so
that neither it nor the capture writes any request's state. On an H200 nano and the canary decode and verify
through it as far from the oracle as without graphs (bundles/h200/2026-11-30).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3_decode.collectives import run_ranks
from k3_decode.decode import OptimisedStep
from k3_decode.state import StepInputs

__all__ = ["GraphedSteps"]


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph with the buffers it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: torch.Tensor
    inputs: StepInputs
    logits: torch.Tensor


class GraphedSteps:
    """Replays the optimised steps of all ranks in this process; captures each shape when it is first met.

    Ranks that share a GPU run one after the other in one graph, up to where they meet.
    """

    def __init__(
        self, ranks: Sequence[OptimisedStep], max_pages: int, drive: Callable[..., Any] = run_ranks
    ) -> None:
        if not ranks:
            raise ValueError("graphs need a rank in this process that runs optimised steps; here is none")
        self._ranks, self._max_pages, self._drive = tuple(ranks), max_pages, drive
        self._captured: dict[tuple[int, int], _Captured] = {}

    def run(self, tokens: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """fp32 logits [B, vocab] of one step; overwritten by the next one."""
        key = (inputs.requests, inputs.rows)
        if key not in self._captured:
            self._captured[key] = self._capture(inputs, tokens.device)
        captured = self._captured[key]
        captured.tokens.copy_(tokens)
        _copy(captured.inputs, inputs)
        captured.graph.replay()
        return captured.logits

    def _capture(self, like: StepInputs, device: torch.device) -> _Captured:
        count = like.requests * like.rows
        tokens = torch.zeros(count, dtype=torch.int64, device=device)
        inputs = StepInputs(
            requests=like.requests,
            rows=like.rows,
            slots=torch.zeros_like(like.slots),
            accepted=None if like.accepted is None else torch.ones_like(like.accepted),
            slot_mapping=torch.full_like(like.slot_mapping, -1),
            block_table=torch.zeros_like(like.block_table),
            lengths=torch.zeros_like(like.lengths),
            context_min=like.context_min,
            context_max=like.context_max,
        )
        launches = [step.launches.clone() for step in self._ranks]
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]  # has no types
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._forward(tokens, inputs)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward(tokens, inputs)
        for step, before in zip(self._ranks, launches, strict=True):
            step.launches.copy_(before)
        return _Captured(graph, tokens, inputs, logits)

    def _forward(self, tokens: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Logits as every rank has them."""
        logits: torch.Tensor = self._drive([step.forward(tokens, inputs) for step in self._ranks])[0]
        return logits


def _copy(target: StepInputs, source: StepInputs) -> None:
    target.slots.copy_(source.slots)
    target.slot_mapping.copy_(source.slot_mapping)
    target.block_table.copy_(source.block_table)
    target.lengths.copy_(source.lengths)
    if target.accepted is not None and source.accepted is not None:
        target.accepted.copy_(source.accepted)
