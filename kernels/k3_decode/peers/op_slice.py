"""Single ops on a GPU, as the harness times layers: `domain.pack.LayerSlice` with one op in a layer's place.

A pass runs the op once over each set of weights. The fastest peer is what counts, whoever made it: vLLM's own
kernel, cuBLAS, Marlin, Humming, FlashInfer, FlashMLA or FA3-MLA. Nothing between ranks belongs to an op.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from k3_decode.kernel_objects import Form, build_objects, recorded_forms, use_objects
from k3_decode.op_table import load_ops
from k3_decode.ops import OPS
from k3_decode.ops.contract import LAUNCH_SLOTS, OP_NAMES, Role
from k3_decode.peers.layer_arms import Case
from k3_decode.peers.layer_slice import (
    BATCHES,
    PAGE_BYTES,
    POOL_BYTES,
    Counts,
    TokenError,
    read_rate,
)
from k3_decode.peers.op_arms import BUILDERS, Bench, Call, OpArms
from k3_decode.peers.timing import capture, kernels_of

__all__ = ["PREFIX", "OpSlice", "open_op"]

PREFIX = "op."
"""Of a kind that is a single op."""
WITH_POOL = frozenset({"mla_query", "mla_attend"})
QUERY_PAGES = 2048
"""Of `mla_query`, whose oracle copies them all."""
LONGEST_CHECKED = 32768
"""Contexts above are compared with float64 by the kernels stage alone."""


def open_op(kind: str, case: Case, sets: int, seed: int, cache_folder: Path) -> "OpSlice":
    """A cell of the benchmark; raises `ValueError` for an op that there is not, or without the peers.

    Kernels are compiled for every batch of the op at once, and kept in `cache_folder`.
    """
    name = kind.removeprefix(PREFIX)
    if name not in BUILDERS:
        raise ValueError(f"no op {name!r} to time; there are {', '.join(BUILDERS)}")
    _compile_all(name, case.tp, cache_folder)
    torch.manual_seed(seed)
    return OpSlice(name, _bench(name, case, sets), cache_folder)


class OpSlice:
    """One op at one rank's shapes, in every way there is."""

    def __init__(self, name: str, bench: Bench, cache_folder: Path) -> None:
        self._bench, self._graphs = bench, dict[str, Any]()
        self._objects = ExitStack()
        self._objects.enter_context(use_objects(cache_folder))
        self._arms: OpArms = BUILDERS[name](bench)
        # Before anything is timed: what moves its state on meets the oracle's in its first run only.
        self._errors = [] if bench.case.context > LONGEST_CHECKED else list(_errors_of(self._arms))

    @property
    def stock_arms(self) -> tuple[str, ...]:
        """Peers by name."""
        return tuple(self._arms.peers)

    def replay(self, arm: str) -> Callable[[], None]:
        """Captures the arm once; each call replays one pass over all sets."""
        if arm not in self._graphs:
            calls = self._calls(arm)
            self._graphs[arm] = capture(lambda: [call() for call in calls], 1)
        replay: Callable[[], None] = self._graphs[arm].replay
        return replay

    def reset(self, arm: str) -> None:
        """An op's inputs stay; a state that moves on costs the same wherever it is."""

    def counts(self, arm: str) -> Counts:
        """Nodes of one replay by torch.profiler; fused ops by the kernels' own counters."""
        replay, sets = self.replay(arm), self._bench.sets
        profile = kernels_of(self._graphs[arm], sets)
        is_optimised = False
        if arm == "optimised":
            self._bench.launches.zero_()
            replay()
            counted = [count / sets for count in self._bench.launches.tolist()]
            mine = counted[OP_NAMES.index(self._arms.op)]
            is_optimised = (
                abs(mine - profile["kernels"]) < 1e-6 and abs(mine - sum(counted)) < 1e-6 and mine > 0
            )
        return Counts(
            kernels=profile["kernels"],
            prefetches=0.0,
            memory_operations=profile["memops"],
            experts=self._arms.experts,
            moved_bytes=self._arms.moved_bytes,
            is_optimised=is_optimised,
        )

    def errors(self) -> list[TokenError]:
        """Of the first set, against float64; stock is the composition of the kernels stage."""
        return self._errors

    def read_gb_per_s(self) -> float:
        """As of layers."""
        return read_rate()

    def absent_exchanges(self) -> tuple[str, ...]:
        """None: an op is one rank's."""
        return ()

    def close(self) -> None:
        """Releases graphs and weights."""
        self._graphs.clear()
        self._objects.close()
        del self._arms
        torch.cuda.empty_cache()

    def _calls(self, arm: str) -> list[Call]:
        return self._arms.optimised if arm == "optimised" else self._arms.peers[arm]


def _errors_of(arms: OpArms) -> Iterator[TokenError]:
    spec, output = OPS[arms.op], arms.output
    truth = spec.oracle(arms.first)[output].double().flatten(1)
    composed = {
        name: value.clone() if isinstance(value, torch.Tensor) and not _is_weight(arms.op, name) else value
        for name, value in arms.first.items()
    }
    spec.stock(**composed)
    found = {"stock": composed[output], "optimised": (arms.checked or arms.optimised[0])()}
    for arm, out in found.items():
        errors = (out.double().flatten(1) - truth).norm(dim=1) / truth.norm(dim=1)
        for token, error in enumerate(errors.tolist()):
            yield TokenError(arm, 0, token, error)


def _is_weight(op: str, name: str) -> bool:
    return any(param.name == name and param.role is Role.WEIGHT for param in OPS[op].params)


def _bench(name: str, case: Case, sets: int) -> Bench:
    from k3_decode.peers.stock_layer import StockLayer

    kernels, device = _stock_kernels(), torch.device("cuda")
    missing = {part: said for part, said in kernels.ext.items() if said != "ok"} | kernels.err
    if missing:
        raise ValueError(f"peers are missing here: {missing}; k3_decode/peers/README.md packs them")
    return Bench(
        case=case,
        sets=sets,
        stock=StockLayer(kernels, case.tp, case.requests),
        table=load_ops("cute", case.shapes, device),
        launches=torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device),
        pool=_pool()[: None if name == "mla_attend" else QUERY_PAGES] if name in WITH_POOL else None,
        humming=_humming(case.tp) if name == "experts" else None,
        flashinfer=_flashinfer() if name == "kda_step" else None,
    )


@cache
def _stock_kernels() -> Any:
    from k3_decode.peers.stock_kernels import StockKernels

    return StockKernels()


@cache
def _flashinfer() -> Any:
    from k3_decode.peers.bench_extra import load_flashinfer_kda

    return load_flashinfer_kda()


@lru_cache(maxsize=1)
def _humming(tp: int) -> Any:
    from k3_decode.peers.bench_humming import HummingExperts
    from k3_decode.peers.stock_layer import dims

    chain = HummingExperts(dims(tp))
    chain.raw = None
    return chain


@cache
def _pool() -> torch.Tensor:
    pool = torch.empty((POOL_BYTES // PAGE_BYTES, 64, 576), dtype=torch.bfloat16, device="cuda")
    return pool.normal_()


@cache
def _compile_all(name: str, tp: int, cache_folder: Path) -> None:
    """Forms of every batch, found by the calls of one set; none depends on the context."""
    forms: list[Form] = []
    for requests in BATCHES:
        kind, context = ("mla", 64) if name.startswith("mla") else ("kda", 0)
        arms = BUILDERS[name](_bench(name, Case(kind, tp, requests, context), 1))
        with recorded_forms() as found:
            for call in (arms.optimised[0], arms.checked):
                if call is not None:
                    call()
        forms += [form for form in found if form not in forms]
    build_objects(forms, cache_folder, os.cpu_count() or 1)
