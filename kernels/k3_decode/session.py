"""A K3 model with its caches, driven step by step on either path.

One process holds every rank. The session tells the dispatcher what each step is, runs the path it decides,
and keeps the accounting of requests. Switching paths between steps changes nothing but the path: both read
and write the same caches.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path

import torch

from k3_decode.collectives import Exchange, run_ranks
from k3_decode.decode import OptimisedStep, calls_of_a_step, is_supported
from k3_decode.dispatch import Decision, Dispatcher, Site, StepFacts, load_guard
from k3_decode.model import PrefillChunk, StockModel
from k3_decode.op_table import OpTable, load_ops, poisoned
from k3_decode.ops.contract import OP_NAMES
from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.oracle import Memory, Oracle
from k3_decode.random_weights import random_checkpoint
from k3_decode.rank_weights import ModelWeights, TensorSource, shard
from k3_decode.shapes import PRESETS, K3Shapes
from k3_decode.state import Pool, Request, Snapshot
from k3_decode.weights import open_checkpoint

__all__ = ["CANARY_FILE", "ModelSession", "OracleSession", "SessionSpec", "launches_of_a_step", "open_model"]

CANARY_FILE = Path(__file__).with_name("canary") / "weights.safetensors"
PREFILL_CHUNK = 1024
"""Prompt tokens that go through the model at once."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """How to open a model."""

    model: str
    implementation: str
    is_on: bool
    tp: int
    max_requests: int
    max_context: int
    drafts: int
    kv_dtype: str
    seed: int
    poisoned_op: str | None = None
    poison_scale: float = 1.05


def open_model(spec: SessionSpec) -> tuple[K3Shapes, TensorSource]:
    """Shapes and tensors of a preset: trained weights where the pack has them, else seeded draws.

    Raises `ValueError` for a preset that is unknown or too large to draw whole.
    """
    if spec.model not in PRESETS:
        raise ValueError(f"no preset {spec.model!r}; there are {', '.join(PRESETS)}")
    shapes = PRESETS[spec.model]
    if spec.model == "canary" and CANARY_FILE.is_file():
        return shapes, open_checkpoint(CANARY_FILE, shapes)
    if shapes.hidden > 1024:
        raise ValueError(f"{spec.model} has no weights here and is too large to draw; use a rank slice of it")
    return shapes, random_checkpoint(shapes, spec.seed)


def launches_of_a_step(spec: SessionSpec, rows: int) -> dict[str, int]:
    """Kernel launches by op that one optimised step of `rows` rows makes, over all ranks."""
    shapes = PRESETS[spec.model]
    table = _ops(spec, shapes)
    return {
        op: calls * table[op].launches_of(rows) * spec.tp for op, calls in calls_of_a_step(shapes).items()
    }


class ModelSession:
    """One open model. Requests are numbers that `prefill` gives and `finish` takes back."""

    def __init__(self, spec: SessionSpec, observer: Callable[[Decision], None] | None = None) -> None:
        self._spec = spec
        self._device = torch.device("cuda" if spec.implementation == "cute" else "cpu")
        self._weights = _rank_weights(spec.model, spec.tp, spec.seed, self._device)
        self._shapes = PRESETS[spec.model]
        self._pool = Pool(
            [w.shapes for w in self._weights],
            max_requests=spec.max_requests,
            max_context=spec.max_context,
            drafts=spec.drafts,
            kv_dtype=spec.kv_dtype,
            device=self._device,
        )
        pairs = list(zip(self._weights, self._pool.caches, strict=True))
        self._stock = [StockModel(weights, caches) for weights, caches in pairs]
        self._optimised = self._optimised_steps() if is_supported(self._shapes) else []
        site = Site(
            arch=_architecture(self._device),
            tp=spec.tp,
            dcp=1,
            kv_dtype=spec.kv_dtype,
            layers=self._shapes.layers,
            is_supported_model=is_supported(self._shapes),
        )
        self._dispatcher = Dispatcher(load_guard(), site, observer)
        self._dispatcher.is_on = spec.is_on
        self._requests: dict[int, Request] = {}
        self._next_id, self._step = 1, 0

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self._shapes.vocab

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """New requests; log-probabilities after each last prompt token, fp32 [B, vocab].

        A prompt that comes several times is computed once, and the others go on from its snapshot.
        """
        longest = max(map(len, prompts))
        self._decide("prefill", [len(prompt) for prompt in prompts], min(map(len, prompts)), longest)
        counts = Counter(tuple(prompt) for prompt in prompts)
        kept: dict[tuple[int, ...], tuple[Snapshot, torch.Tensor]] = {}
        ids, rows = [], []
        for prompt in map(tuple, prompts):
            if prompt in kept:
                snapshot, logits = kept[prompt]
                request = self._pool.resume(snapshot)
            else:
                request = self._pool.admit()
                logits = self._prefill_one(request, prompt)
                if counts[prompt] > 1:
                    kept[prompt] = (self._pool.snapshot(request), logits)
            ids.append(self._next_id)
            self._requests[self._next_id] = request
            self._next_id += 1
            rows.append(logits)
        for snapshot, _ in kept.values():
            self._pool.forget(snapshot)
        return ids, torch.log_softmax(torch.cat(rows).float(), -1)

    @torch.no_grad()
    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each request; log-probabilities of the next one, fp32 [B, vocab]."""
        live = [self._requests[number] for number in requests]
        logits = self._run_rows("decode", live, [[token] for token in tokens])
        for request in live:
            self._pool.accept(request, 1)
        return torch.log_softmax(logits.float(), -1)

    @torch.no_grad()
    def verify(
        self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> torch.Tensor:
        """One speculative step; keeps the first `accepted[i]` rows of request i.

        fp32 [rows in all, vocab].
        """
        live = [self._requests[number] for number in requests]
        logits = self._run_rows("verify", live, rows)
        for request, count in zip(live, accepted, strict=True):
            self._pool.accept(request, count)
        return torch.log_softmax(logits.float(), -1)

    def finish(self, requests: Sequence[int]) -> None:
        """Frees slots and pages."""
        for number in requests:
            self._pool.release(self._requests.pop(number))

    def switch(self, arm: str) -> None:
        """`optimised` or `stock`, from the next step on."""
        self._dispatcher.is_on = arm == "optimised"

    def launches(self) -> dict[str, int]:
        """Kernel launches by op over all ranks since the session opened."""
        totals = dict.fromkeys(OP_NAMES, 0)
        for step in self._optimised:
            for name, count in zip(OP_NAMES, step.launches.tolist(), strict=False):
                totals[name] += count
        return {name: count for name, count in totals.items() if count}

    def watched(self) -> dict[str, torch.Tensor]:
        """Weights and caches by name, with the rank in front."""
        found: dict[str, torch.Tensor] = {}
        for rank, (weights, caches) in enumerate(zip(self._weights, self._pool.caches, strict=True)):
            found |= {f"rank{rank}.weights.{k}": t for k, t in _tensors_of(weights)}
            found |= {f"rank{rank}.{k}": t for k, t in caches.named().items()}
        return found

    def writable(self, requests: Sequence[int]) -> dict[str, torch.Tensor]:
        """For each cache, what the next decode step of `requests` may write."""
        live = [self._requests[number] for number in requests]
        for request in live:
            self._pool.reserve(request, 1)
        slots = [slot for request in live for slot in request.slots]
        cells = [self._pool.slots_of_rows(request, request.length, 1)[0] for request in live]
        masks = {}
        for rank, caches in enumerate(self._pool.caches):
            for name, tensor in caches.named().items():
                mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
                if name.endswith("kv_cache"):
                    for cell in cells:
                        mask[cell // PAGE_SIZE, cell % PAGE_SIZE] = True
                else:
                    mask[slots] = True
                masks[f"rank{rank}.{name}"] = mask
        return masks

    def close(self) -> None:
        """Forgets every request."""
        self.finish(list(self._requests))

    def _optimised_steps(self) -> list[OptimisedStep]:
        table = _ops(self._spec, self._shapes)
        rows = max(1, self._spec.max_requests) * (self._spec.drafts + 1)
        pairs = zip(self._weights, self._pool.caches, strict=True)
        return [OptimisedStep(weights, caches, table, rows) for weights, caches in pairs]

    def _prefill_one(self, request: Request, prompt: Sequence[int]) -> torch.Tensor:
        logits = torch.empty(0)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            part = list(prompt[start : start + PREFILL_CHUNK])
            self._pool.reserve(request, len(part))
            cells = self._pool.slots_of_rows(request, request.length, len(part))
            chunk = PrefillChunk(
                home=request.slots[0],
                start=request.length,
                slot_mapping=torch.tensor(cells, device=self._device),
                pages=torch.tensor(request.pages, device=self._device),
            )
            tokens = torch.tensor(part, device=self._device)
            logits = _first(run_ranks([model.forward(tokens, chunk) for model in self._stock]))
            request.length += len(part)
        return logits

    def _run_rows(self, phase: str, live: Sequence[Request], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [rows in all, vocab] of one step on the path that the dispatcher decides."""
        count = len(rows[0])
        step = self._pool.step_inputs(live, count)
        decision = self._decide(phase, [len(row) for row in rows], step.context_min, step.context_max)
        tokens = torch.tensor([token for row in rows for token in row], device=self._device)
        arms: Sequence[OptimisedStep | StockModel] = self._stock
        if decision.path == "optimised":
            arms = self._optimised
        exchanges: list[Exchange] = [arm.forward(tokens, step) for arm in arms]
        return _first(run_ranks(exchanges)).clone()

    def _decide(self, phase: str, rows: Sequence[int], context_min: int, context_max: int) -> Decision:
        facts = StepFacts(
            step=self._step,
            phase=phase,  # type: ignore[arg-type]  # one of the four phases, from this module's own calls
            rows_by_request=tuple(rows),
            is_graph=False,
            context_min=context_min,
            context_max=context_max,
        )
        self._step += 1
        return self._dispatcher.decide(facts)


class OracleSession:
    """The float64 oracle behind the same calls; no batch effects, no caches to watch."""

    def __init__(self, spec: SessionSpec) -> None:
        self._shapes, source = open_model(spec)
        self._oracle = Oracle(source, self._shapes)
        self._memories: dict[int, Memory] = {}
        self._next_id = 1

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self._shapes.vocab

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """As `ModelSession.prefill`, in float64."""
        ids, rows = [], []
        for prompt in prompts:
            memory = Memory()
            rows.append(self._oracle.logits(list(prompt), memory)[-1:])
            self._memories[self._next_id] = memory
            ids.append(self._next_id)
            self._next_id += 1
        return ids, torch.log_softmax(torch.cat(rows), -1)

    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """As `ModelSession.decode`, in float64."""
        rows = [self._oracle.logits([t], self._memories[r]) for r, t in zip(requests, tokens, strict=True)]
        return torch.log_softmax(torch.cat(rows), -1)

    def verify(
        self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> torch.Tensor:
        """As `ModelSession.verify`, in float64."""
        out = []
        for number, row, count in zip(requests, rows, accepted, strict=True):
            out.append(self._oracle.logits(list(row), self._memories[number].copy()))
            self._oracle.logits(list(row[:count]), self._memories[number])
        return torch.log_softmax(torch.cat(out), -1)

    def finish(self, requests: Sequence[int]) -> None:
        """Forgets requests."""
        for number in requests:
            self._memories.pop(number)

    def switch(self, arm: str) -> None:
        """The oracle has one path."""

    def launches(self) -> Mapping[str, int]:
        """None: no optimised op runs."""
        return {}

    def watched(self) -> Mapping[str, torch.Tensor]:
        """Nothing."""
        return {}

    def writable(self, requests: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Forgets every request."""
        self._memories.clear()


@lru_cache(maxsize=4)
def _rank_weights(model: str, tp: int, seed: int, device: torch.device) -> tuple[ModelWeights, ...]:
    """Every rank's weights.

    Kept, as a check opens several sessions on the same model; nobody may write them.
    """
    spec = SessionSpec(model, "cpu", False, tp, 1, 1, 0, "bf16", seed)
    shapes, source = open_model(spec)
    rank_shapes = shapes.rank(tp)
    return tuple(shard(source, rank_shapes, rank, device) for rank in range(tp))


def _ops(spec: SessionSpec, shapes: K3Shapes) -> OpTable:
    device = torch.device("cuda" if spec.implementation == "cute" else "cpu")
    table = load_ops(spec.implementation, shapes.rank(spec.tp), device)
    return table if spec.poisoned_op is None else poisoned(table, spec.poisoned_op, spec.poison_scale)


def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def _first(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Every rank ends with the same logits; rank 0's are taken."""
    return results[0]


def _tensors_of(value: object, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor of nested dataclasses and tuples, by dotted name."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, tuple):
        parts = [(str(i), part) for i, part in enumerate(value)]
    else:
        return []
    return [pair for key, part in parts for pair in _tensors_of(part, f"{name}.{key}" if name else key)]
