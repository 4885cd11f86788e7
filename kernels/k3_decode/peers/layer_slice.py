"""Whole layers of one rank on a GPU, as the harness times them: `domain.pack.LayerSlice`.

One process holds the weights of one kind at one TP for all its cells; each cell has states and buffers of its
own. Stock's ways are Marlin or Humming for the experts and FlashMLA or FA3-MLA for the attention, whichever
the machine has; without vLLM's kernels there is nothing to compare with, and opening a slice raises.
"""

import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from k3_decode.bound_layers import Layout
from k3_decode.kernel_objects import build_objects, use_objects
from k3_decode.op_table import Bound, OpTable, load_ops
from k3_decode.ops.contract import OP_NAMES
from k3_decode.peers.layer_arms import Case, Memory, OptimisedArm, draw_layer, make_memory
from k3_decode.peers.layer_forms import forms_of
from k3_decode.peers.layer_oracle import row_errors, truth_before_experts
from k3_decode.peers.timing import capture, kernels_of
from k3_decode.rank_weights import LayerWeights
from k3_decode.step_buffers import Buffers

__all__ = [
    "ABSENT",
    "KINDS",
    "Counts",
    "LayerSlice",
    "TokenError",
    "load_weights",
    "open_slice",
    "read_rate",
    "sharing",
]

KINDS = {"kda_moe": "kda", "mla_moe": "mla"}
ABSENT = (
    "all-reduce of the attention's output [B, hidden]",
    "all-reduce of the routed latent [B, latent]",
    "all-reduce of the shared expert's output [B, hidden]",
    "waiting for the peers' logits, latents and outputs (sharded layout)",
)
"""Exchanges that neither arm waits for."""
BATCHES = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64)
"""What kernels are compiled for ahead of the first cell."""
POOL_BYTES = 12 * 2**30
PAGE_BYTES = 64 * 576 * 2
CHECKED_LAYER = 0
LONGEST_CHECKED = 32768
"""Contexts above are compared with float64 by the kernels stage alone: a layer's keys in float64 fill the
device."""
READ_BYTES = 8 * 2**30
AGAIN = 7
"""More runs of the checked layer, whose bits must be the first run's."""
PREFETCH_PLACE = 15


class TokenError(NamedTuple):
    """See `domain.pack.LayerError`."""

    arm: str
    layer: int
    token: int
    error: float


@dataclass(frozen=True, slots=True)
class Counts:
    """See `domain.pack.LayerCounts`."""

    kernels: float
    prefetches: float
    memory_operations: float
    experts: float
    moved_bytes: float
    is_optimised: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """The layers of one kind at one TP in every layout that an arm takes."""

    kind: str
    tp: int
    layers: tuple[LayerWeights, ...]
    stock: tuple[dict[str, Any], ...]
    kernels: Any
    humming: Any
    table: OpTable
    pool: torch.Tensor | None

    def memory(self, case: Case, seed: int) -> Memory:
        """Equal memories for equal seeds."""
        generator = torch.Generator("cuda").manual_seed(seed + 1)
        return make_memory(case, len(self.layers), self.pool, generator)


def load_weights(kind: str, tp: int, layers: int, seed: int) -> Weights:
    """The layers laid out for both arms; kept until others are asked for, which two do not fit beside.

    Raises `ValueError` where a stock kernel is missing here.
    """
    key, shelf = (kind, tp, layers, seed), _shelf()
    if key not in shelf:
        shelf.clear()
        gc.collect()
        torch.cuda.empty_cache()
        shelf[key] = _draw_weights(kind, tp, layers, seed)
    return shelf[key]


@cache
def _shelf() -> dict[tuple[str, int, int, int], Weights]:
    """Where the process keeps its one set of weights."""
    return {}


def _draw_weights(kind: str, tp: int, layers: int, seed: int, *, with_humming: bool = True) -> Weights:
    from k3_decode.peers.stock_arm import marlin_weights, stock_weights
    from k3_decode.peers.stock_kernels import StockKernels

    kernels = StockKernels()
    missing = {name: said for name, said in kernels.ext.items() if said != "ok"} | kernels.err
    if missing:
        raise ValueError(f"stock kernels are missing here: {missing}; k3_decode/peers/README.md packs them")
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = Case(kind, tp, 1).shapes
    drawn = tuple(draw_layer(kind, shapes, generator) for _ in range(layers))
    stock = tuple({**stock_weights(layer), **marlin_weights(layer)} for layer in drawn)
    humming = _humming(tp) if with_humming else None
    if humming is not None:
        stock = tuple({**weights, **humming.weights()} for weights in stock)
    pool = None
    if kind == "mla":
        pool = torch.empty((POOL_BYTES // PAGE_BYTES, 64, 576), dtype=torch.bfloat16, device="cuda")
        pool.normal_(generator=generator)
    table = sharing(load_ops("cute", shapes, torch.device("cuda")))
    return Weights(kind, tp, drawn, stock, kernels, humming, table, pool)


def open_slice(kind: str, layout: Layout, case: Case, layers: int, seed: int, cache: Path) -> "LayerSlice":
    """A cell of the benchmark; raises `ValueError` for a kind that there is not.

    Kernels are compiled for every batch of the kind at once, and kept in `cache`.
    """
    if kind not in KINDS:
        raise ValueError(f"no layers of kind {kind!r}; there are {', '.join(KINDS)}")
    _compile_all(case.kind, case.tp, cache)
    return LayerSlice(load_weights(KINDS[kind], case.tp, layers, seed), layout, case, seed, cache)


class LayerSlice:
    """One cell: the same layers in both arms."""

    def __init__(self, weights: Weights, layout: Layout, case: Case, seed: int, cache: Path) -> None:
        self._weights, self._layout, self._case, self._seed = weights, layout, case, seed
        self._objects = ExitStack()
        self._objects.enter_context(use_objects(cache))
        self._arms: dict[str, Any] = {}
        self._graphs: dict[str, Any] = {}

    @property
    def stock_arms(self) -> tuple[str, ...]:
        """Experts by Marlin or Humming, attention by FlashMLA or FA3-MLA."""
        experts = ("marlin", "humming") if self._weights.humming is not None else ("marlin",)
        if self._case.kind == "kda":
            return experts
        return tuple(f"{name}+{core}" for name in experts for core in ("flashmla", "fa3"))

    def replay(self, arm: str) -> Callable[[], None]:
        """Captures the arm once; each call replays one pass over all layers."""
        if arm not in self._graphs:
            self.reset(arm)
            self._graphs[arm] = capture(self._arm(arm).step, 1)
        graph = self._graphs[arm]
        replay: Callable[[], None] = graph.replay
        return replay

    def reset(self, arm: str) -> None:
        """Puts the residual stream back to where a pass begins."""
        self._arm(arm).reset()

    def counts(self, arm: str) -> Counts:
        """Nodes of one replay by torch.profiler; fused ops by the kernels' own counters."""
        replay, layers = self.replay(arm), len(self._weights.layers)
        profile = kernels_of(self._graphs[arm], layers)
        prefetches, is_optimised = 0.0, False
        if arm == "optimised":
            chain = self._arm(arm).chain
            self.reset(arm)
            chain.launches.zero_()
            replay()
            counted = [count / layers for count in chain.launches.tolist()]
            prefetches = counted[PREFETCH_PLACE]
            named = sum(counted[: len(OP_NAMES)])
            is_optimised = abs(named + prefetches - profile["kernels"]) < 1e-6 and named > 0
            chosen = [self._arm(arm).buffer("ids")]
        else:
            self._arm(arm).step()
            chosen = self._arm(arm).layer_ids
        experts = sum(ids.unique().numel() for ids in chosen) / len(chosen)
        return Counts(
            kernels=profile["kernels"] - prefetches,
            prefetches=prefetches,
            memory_operations=profile["memops"],
            experts=experts,
            moved_bytes=self._moved_bytes(arm, experts),
            is_optimised=is_optimised,
        )

    def errors(self) -> list[TokenError]:
        """One layer alone in each arm on equal inputs, against float64; the best-known peers for stock.

        Raises `ValueError` where the optimised layer gives other bits when it runs again: ops that never
        differ alone may where others run beside them.
        """
        from k3_decode.peers.stock_arm import StockArm

        weights, case, index = self._weights, self._case, CHECKED_LAYER
        if case.context > LONGEST_CHECKED:
            case = replace(case, context=LONGEST_CHECKED)
        fresh = weights.memory(case, self._seed)
        layer = weights.layers[index]
        truth = truth_before_experts(layer, index, case, fresh, fresh.embedding, fresh.delta)
        stock = StockArm(
            weights.kernels, list(weights.stock), case, weights.memory(case, self._seed), weights.pool
        )
        found = stock.one_layer(index, fresh.embedding, fresh.delta)
        result = [("stock", found["out"], found["ids"])]
        whole = self._one_layer(layer, index, case, "whole", None)
        arm = whole if self._layout == "whole" else self._one_layer(layer, index, case, self._layout, whole)
        for _ in range(AGAIN):
            again = self._one_layer(layer, index, case, self._layout, whole)
            _require_same_bits(arm.chain.buffers, again.chain.buffers)
        result.append(("optimised", arm.buffer("ffn")[0, 0], arm.buffer("ids")))
        return [
            TokenError(name, index, token, error)
            for name, out, ids in result
            for token, error in enumerate(row_errors(out, truth.after(ids)).tolist())
        ]

    def read_gb_per_s(self) -> float:
        """An xor-reduce over 8 GB, several launch shapes; the best is the ceiling."""
        return read_rate()

    def absent_exchanges(self) -> tuple[str, ...]:
        """Between ranks: what neither arm waits for."""
        return ABSENT

    def close(self) -> None:
        """Releases graphs and states; the weights stay for the next cell."""
        self._graphs.clear()
        self._arms.clear()
        self._objects.close()
        torch.cuda.empty_cache()

    def _arm(self, name: str) -> Any:
        if name not in self._arms:
            self._arms[name] = self._optimised() if name == "optimised" else self._stock(name)
        return self._arms[name]

    def _optimised(self) -> OptimisedArm:
        weights, case = self._weights, self._case
        whole = OptimisedArm(
            list(weights.layers), case, weights.memory(case, self._seed), weights.table, layout="whole"
        )
        if self._layout == "whole":
            return whole
        whole.step()
        arm = OptimisedArm(
            list(weights.layers), case, weights.memory(case, self._seed), weights.table, layout=self._layout
        )
        arm.fill_peers(whole)
        return arm

    def _stock(self, name: str) -> Any:
        from k3_decode.peers.stock_arm import StockArm

        weights, case = self._weights, self._case
        experts, _, core = name.partition("+")
        return StockArm(
            weights.kernels,
            list(weights.stock),
            case,
            weights.memory(case, self._seed),
            weights.pool,
            weights.humming if experts == "humming" else None,
            core or "flashmla",
        )

    def _one_layer(
        self, layer: LayerWeights, index: int, case: Case, layout: Layout, peers: OptimisedArm | None
    ) -> OptimisedArm:
        memory = self._weights.memory(case, self._seed)
        caches = memory.caches
        caches.kda = {0: caches.kda[index]} if caches.kda else {}
        caches.mla = {0: caches.mla[index]} if caches.mla else {}
        arm = OptimisedArm([layer], case, memory, self._weights.table, layout=layout)
        if peers is not None:
            arm.fill_peers(peers)
        arm.step()
        return arm

    def _moved_bytes(self, arm: str, experts: float) -> float:
        from k3_decode.peers.stock_layer import bytes_layer, dims

        case = self._case
        found = bytes_layer(dims(case.tp), case.kind, case.requests, experts, case.context)
        is_sharded = arm == "optimised" and self._layout == "sharded"
        return float(found["ideal" if is_sharded else "stock"])


def _require_same_bits(first: Buffers, again: Buffers) -> None:
    """Raises `ValueError` that names the buffers in which two runs differ."""
    counts = {
        name: int((buffer.view(torch.uint8) != again[name].view(torch.uint8)).sum())
        for name, buffer in first.items()
    }
    if any(counts.values()):
        told = ", ".join(f"{name} in {count} bytes" for name, count in counts.items() if count)
        raise ValueError(
            f"the optimised layer differs from run to run on equal inputs: {told}; look for a race in the op "
            "that writes the first of them in the layer's order"
        )


@lru_cache(maxsize=8)
def _compile_all(kind: str, tp: int, cache: Path) -> None:
    """Forms do not depend on the context."""
    cases = [Case(kind, tp, requests, 64 if kind == "mla" else 0) for requests in BATCHES]
    build_objects(forms_of(cases, ("whole", "sharded")), cache, os.cpu_count() or 1)


def sharing(table: OpTable) -> OpTable:
    """The table, laying out the same weights once for all arms."""

    def once(prepare: Callable[..., Bound]) -> Callable[..., Bound]:
        kept: dict[Any, Bound] = {}

        def prepared(**weights: torch.Tensor) -> Bound:
            key = tuple((name, weight.data_ptr(), weight.shape) for name, weight in weights.items())
            if key not in kept:
                kept[key] = prepare(**weights)
            return dict(kept[key])

        return prepared

    return {name: replace(op, prepare=once(op.prepare)) for name, op in table.items()}


@lru_cache(maxsize=1)
def _humming(tp: int) -> Any:
    """Humming's chain for the sizes of a TP; its transform takes seconds, and is the same for both kinds."""
    from k3_decode.peers.bench_humming import HummingExperts
    from k3_decode.peers.stock_layer import dims

    chain = HummingExperts(dims(tp))
    chain.raw = None
    return chain


@lru_cache(maxsize=1)
def read_rate() -> float:
    """GB/s of an xor-reduce over 8 GB, once a process."""
    from k3_decode.peers.bench_stock import read_rate as measured

    return float(measured(READ_BYTES))
