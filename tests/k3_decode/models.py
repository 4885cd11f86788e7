"""Small models, their oracle's answers and engines over them, made once for all tests."""

import random
from collections.abc import Callable
from functools import cache

import torch
from k3_decode.dispatch import Decision, load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.oracle import Memory, Oracle
from k3_decode.random_weights import random_checkpoint
from k3_decode.rank_weights import ModelWeights, shard
from k3_decode.shapes import PRESETS
from k3_decode.weights import Checkpoint

__all__ = ["TEXT", "checkpoint", "divergence", "engine", "oracle_logprobs", "ranks", "text"]

CPU = torch.device("cpu")
LENGTH = 56


def text(length: int, seed: int) -> list[int]:
    """Tokens of nano's vocabulary."""
    source = random.Random(seed)
    return [source.randrange(320) for _ in range(length)]


TEXT = text(LENGTH, 1)
"""What the oracle has answered."""


@cache
def checkpoint(model: str) -> Checkpoint:
    return random_checkpoint(PRESETS[model], 0)


@cache
def ranks(model: str = "nano", tp: int = 1) -> tuple[ModelWeights, ...]:
    shapes = PRESETS[model].rank(tp)
    return tuple(shard(checkpoint(model), shapes, rank, CPU) for rank in range(tp))


@cache
def oracle_logprobs(model: str = "nano") -> torch.Tensor:
    """Float64 log-probabilities [LENGTH, vocab] after each token of `TEXT`."""
    logits = Oracle(checkpoint(model), PRESETS[model]).logits(TEXT, Memory())
    return torch.log_softmax(logits, dim=-1)


def engine(
    options: EngineOptions,
    *,
    model: str = "nano",
    tp: int = 1,
    observer: Callable[[Decision], None] | None = None,
) -> Engine:
    return Engine(ranks(model, tp), load_guard(), options, observer)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) in nats, by row of log-probabilities."""
    wide = reference.double()
    return (wide.exp() * (wide - other.double())).sum(-1)
