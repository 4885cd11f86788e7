"""A preset's model behind the calls that the harness makes: on either path, or as the float64 oracle.

One process holds every rank. The serving itself is `engine.py`; this module finds weights and keeps them
between sessions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from k3_decode.decode import calls_of_a_step
from k3_decode.dispatch import Decision, load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.kernel_objects import use_objects
from k3_decode.manifest import Use, kinds_of_layers, meetings_of_a_step, uses_of
from k3_decode.op_table import OpTable, load_ops
from k3_decode.oracle import Memory, Oracle
from k3_decode.overlap import Place, overlap_of
from k3_decode.random_weights import random_checkpoint
from k3_decode.rank_weights import ModelWeights, TensorSource, shard
from k3_decode.shapes import PRESETS, K3Shapes
from k3_decode.weights import open_checkpoint

__all__ = [
    "CANARY_FILE",
    "ModelSession",
    "OracleSession",
    "SessionSpec",
    "kernels_of_a_step",
    "launches_of_a_step",
    "open_model",
]

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
    is_graph: bool = False
    kept_prefixes: int = 0
    prefill_chunk: int = PREFILL_CHUNK
    cache: Path | None = None
    """Where compiled kernels are kept."""


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
    table = _counted_ops(spec.implementation, spec.model, spec.tp)
    place: Place = "along"
    if spec.implementation == "cute":
        place = overlap_of(shapes.shared_inter // spec.tp, rows).served("narrow_mlp" in table).shared
    calls_of = calls_of_a_step(shapes, is_aside=place != "along")
    launches = {op: calls * table[op].launches_of(rows) * spec.tp for op, calls in calls_of.items()}
    if place.startswith("narrow"):  # one launch in place of two
        launches["situ_mlp"] -= (shapes.layers - 1) * spec.tp
    return launches


def kernels_of_a_step(spec: SessionSpec, rows: int) -> tuple[tuple[Use, ...], dict[str, int]]:
    """Kernels of one optimised step of `rows` rows, and how many layers of each kind all ranks run."""
    shapes = PRESETS[spec.model]
    table = _counted_ops(spec.implementation, spec.model, spec.tp)
    uses = uses_of(shapes, table, spec.implementation, rows, spec.tp)
    layers = {kind: count * spec.tp for kind, count in kinds_of_layers(shapes).items()}
    return uses, {**layers, "step": spec.tp, **(meetings_of_a_step(shapes) if spec.tp > 1 else {})}


class ModelSession:
    """One open model: an `Engine` over a preset's weights, by the names that the harness uses."""

    def __init__(self, spec: SessionSpec, observer: Callable[[Decision], None] | None = None) -> None:
        device = torch.device("cuda" if spec.implementation == "cute" else "cpu")
        options = EngineOptions(
            max_requests=spec.max_requests,
            max_context=spec.max_context,
            drafts=spec.drafts,
            kv_dtype=spec.kv_dtype,
            implementation=spec.implementation,
            arch=_architecture(device),
            is_on=spec.is_on,
            is_graph=spec.is_graph,
            prefill_chunk=spec.prefill_chunk,
            kept_prefixes=spec.kept_prefixes,
            poisoned_op=spec.poisoned_op,
            poison_scale=spec.poison_scale,
        )
        self._objects = ExitStack()
        if spec.implementation == "cute" and spec.cache is not None:
            self._objects.enter_context(use_objects(spec.cache))
        weights = _rank_weights(spec.model, spec.tp, spec.seed, device)
        self._engine = Engine(weights, load_guard(), options, observer)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self._engine.vocab_size

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """New requests; log-probabilities after each last prompt token, fp32 [B, vocab]."""
        return self._engine.prefill(prompts)

    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each request; log-probabilities of the next one, fp32 [B, vocab]."""
        return self._engine.decode(requests, tokens)

    def verify(
        self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> torch.Tensor:
        """One speculative step; keeps the first `accepted[i]` rows of request i.

        fp32 [rows in all, vocab].
        """
        return self._engine.verify(requests, rows, accepted)

    def finish(self, requests: Sequence[int]) -> None:
        """Frees slots and pages."""
        self._engine.finish(requests)

    def switch(self, arm: str) -> None:
        """`optimised` or `stock`, from the next step on."""
        self._engine.switch(arm == "optimised")

    def launches(self) -> dict[str, int]:
        """Kernel launches by op over all ranks since the session opened."""
        return self._engine.launches()

    def expert_choices(self) -> tuple[int, list[list[int]]]:
        """Experts of a layer in all, and of each row of the last step in its last MoE layer."""
        return self._engine.expert_choices()

    def watched(self) -> dict[str, torch.Tensor]:
        """Weights, prepared weights, caches and step buffers by name, with the rank in front."""
        return self._engine.watched()

    def writable(self, requests: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the next step of `requests` may write."""
        return self._engine.writable(requests)

    def prefix_counters(self) -> tuple[int, int, int]:
        """Prompts that asked for a kept prefix, those that found one, and tokens that it spared."""
        kept = self._engine.prefixes
        return kept.queries, kept.hits, kept.reused_tokens

    def close(self) -> None:
        """Forgets every request, lets the kept kernels go and gives the thread count back."""
        self._engine.close()
        self._objects.close()


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

    def expert_choices(self) -> tuple[int, list[list[int]]]:
        """None: nobody asks how the oracle's experts were spread."""
        return 0, []

    def watched(self) -> Mapping[str, torch.Tensor]:
        """Nothing."""
        return {}

    def writable(self, requests: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Nothing."""
        return {}

    def prefix_counters(self) -> tuple[int, int, int]:
        """None: the oracle keeps no prefixes."""
        return 0, 0, 0

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


@lru_cache(maxsize=8)
def _counted_ops(implementation: str, model: str, tp: int) -> OpTable:
    """The table whose launches are counted: asked once a step, so it is kept, and holds no memory."""
    device = torch.device("meta" if implementation == "cute" else "cpu")
    return load_ops(implementation, PRESETS[model].rank(tp), device)


def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"
