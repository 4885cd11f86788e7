"""Agentic traffic as a file or drawn: turns that grow one context, pauses for tools, branches side by side.

One request a line of JSON. A request waits for those named in `after`, then for `pause_s`, and carries its
parent's prompt and answer before its own tokens. Answers in prompts are drawn from the seed and are not what
the server said, so that both arms of a comparison are asked the same, token by token.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from harness.domain.errors import InputError
from harness.domain.record import Name, Number, Positive, Record, Whole

__all__ = ["Trace", "TraceRequest", "draw_trace", "load_trace", "prompts_of"]

MOST_REQUESTS = 2000
MOST_BYTES = 16 * 2**20


class TraceRequest(Record):
    """One request of one user."""

    id: Name
    user: Name
    after: tuple[Name, ...] = ()
    """Requests that must be answered first."""
    pause_s: Number = 0.0
    """From their last answer on: what a tool takes."""
    parent: Name | None = None
    """Request whose prompt and answer come before `new_tokens`."""
    shared: str = ""
    """Name of a prefix that all requests with this name begin with; of requests without a parent."""
    shared_tokens: Whole = 0
    new_tokens: Positive
    output_tokens: int = Field(ge=2)


class Trace(Record):
    """Requests in an order in which each comes behind those that it waits for."""

    requests: tuple[TraceRequest, ...] = Field(min_length=1, max_length=MOST_REQUESTS)

    @model_validator(mode="after")
    def _each_waits_for_earlier_ones(self) -> Self:
        seen: set[str] = set()
        for request in self.requests:
            if request.id in seen:
                raise ValueError(f"request {request.id!r} is there twice")
            unknown = {*request.after, *([request.parent] if request.parent else [])} - seen
            if unknown:
                raise ValueError(f"{request.id!r} waits for {sorted(unknown)[0]!r}, which is not above it")
            if request.parent is not None and request.parent not in request.after:
                raise ValueError(f"{request.id!r} continues {request.parent!r} and does not wait for it")
            seen.add(request.id)
        return self

    @property
    def users(self) -> tuple[str, ...]:
        """By their first request."""
        return tuple(dict.fromkeys(request.user for request in self.requests))


def load_trace(path: Path) -> Trace:
    """A user's trace; raises `InputError` naming the file and the first thing that is wrong."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} is larger than {MOST_BYTES >> 20} MiB; replay a part of it")
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return Trace(requests=tuple(TraceRequest.model_validate(row) for row in rows))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the trace"
        raise InputError(f"{path}: {where}: {first['msg']}; see sweeps/README.md for the form") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: no trace can be read here: {str(error)[:200]}") from error


def draw_trace(users: int, turns: int = 3, branches: int = 2, *, scale: int = 1) -> Trace:
    """A small trace in the manner of coding agents: a system prompt that all share, some turns with a tool
    between them, and in the middle sub-tasks side by side, of which the next turn waits for all.

    `scale` multiplies every number of tokens.
    """
    found: list[TraceRequest] = []
    for user in (f"user{n}" for n in range(users)):
        last: tuple[str, ...] = ()
        for turn in range(turns):
            width = branches if turns > 2 and turn == turns // 2 else 1
            names = tuple(f"{user}.{turn}" + (f".{b}" if width > 1 else "") for b in range(width))
            found += [_turn(name, user, turn, last, scale) for name in names]
            last = names
    return Trace(requests=tuple(found))


def _turn(name: str, user: str, turn: int, last: tuple[str, ...], scale: int) -> TraceRequest:
    return TraceRequest(
        id=name, user=user, after=last, parent=last[0] if last else None, pause_s=0.05 * turn,
        shared="" if last else "system", shared_tokens=0 if last else 192 * scale, new_tokens=24 * scale,
        output_tokens=16 * scale,
    )  # fmt: skip


def prompts_of(trace: Trace, vocabulary: int, seed: int) -> Mapping[str, tuple[int, ...]]:
    """The prompt of each request in tokens, the same for every arm."""
    prompts: dict[str, tuple[int, ...]] = {}
    answers: dict[str, tuple[int, ...]] = {}
    for request in trace.requests:
        if request.parent is not None:
            before = prompts[request.parent] + answers[request.parent]
        else:
            before = _drawn(f"{seed} shared {request.shared}", request.shared_tokens, vocabulary)
        prompts[request.id] = before + _drawn(f"{seed} new {request.id}", request.new_tokens, vocabulary)
        answers[request.id] = _drawn(f"{seed} answer {request.id}", request.output_tokens, vocabulary)
    return prompts


def _drawn(seed: str, count: int, vocabulary: int) -> tuple[int, ...]:
    """Tokens that are no special ones in common vocabularies, which keep those below 16 or at the end."""
    source = random.Random(seed)
    return tuple(source.randrange(16, max(17, vocabulary - 300)) for _ in range(count))
