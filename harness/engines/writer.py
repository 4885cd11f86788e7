"""Write answers with a session: choose tokens from log-probabilities until each answer has ended.

Works on whatever tensors the session gives, by their own methods. A row with a NaN, or with nothing finite,
ends its answer with `error`: it is never read as a likely token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from harness.domain.pack import Session
from harness.measure.goodness import Draw

__all__ = ["StepTaken", "Writer", "drawn_places", "write_answers"]

Tensor = Any
StepTaken = tuple[int | None, str]
"""Number of a step in the ledger, None for a prefill, and its `path/reason`."""
LIKELIEST = 5
"""Tokens whose log-probabilities an answer keeps at each position; servers commonly give no more."""


def _no_step() -> StepTaken:
    return None, ""


@dataclass
class Writer:
    """One answer while it is written: takes log-probabilities [vocab], chooses a token, knows when to
    stop.
    """

    prompt: Sequence[int]
    max_tokens: int
    stop_token: int
    pieces: Sequence[bytes] = ()
    """What each token adds to the text; empty: no text, so no stop texts either."""
    stop_texts: tuple[bytes, ...] = ()
    temperature: float = 0.0
    number: Callable[[int], float] = lambda _place: 0.0
    """The draw at a place of the answer, from 0 to 1: the same for every arm."""
    allowed: Callable[[], Sequence[int]] | None = None
    """Tokens that may come next; None: any."""
    advance: Callable[[int], None] = lambda _token: None
    """Told every token that was chosen."""
    tokens: list[int] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    steps: list[StepTaken] = field(default_factory=list)
    finish: str | None = None
    text: bytes = b""
    """Without the stop text that ended it."""

    def take(self, logprobs: Tensor, step: StepTaken) -> None:
        """Choose the next token."""
        if bool(logprobs.isnan().any()) or not bool(logprobs.isfinite().any()):
            self.finish = "error"
            return
        token = self._choose(self._masked(logprobs))
        values, ids = logprobs.topk(min(LIKELIEST, logprobs.shape[-1]))
        kept = [pair for pair in zip(ids.tolist(), values.tolist(), strict=True) if isfinite(pair[1])]
        own = [] if token in (t for t, _ in kept) else [(token, float(logprobs[token]))]
        self.likeliest.append((*kept, *own))
        self.tokens.append(token)
        self.steps.append(step)
        self.advance(token)
        self._end(token)

    def _masked(self, logprobs: Tensor) -> Tensor:
        if self.allowed is None:
            return logprobs
        ids = list(self.allowed())
        masked = logprobs.new_full(logprobs.shape, -inf)
        masked[ids] = logprobs[ids]
        return masked

    def _choose(self, logprobs: Tensor) -> int:
        if self.temperature == 0:
            return int(logprobs.argmax())
        values, ids = (logprobs.double() / self.temperature).sort(descending=True, stable=True)
        cumulative = values.softmax(0).cumsum(0)
        place = int((cumulative <= self.number(len(self.tokens)) * float(cumulative[-1])).sum())
        return int(ids[min(place, len(cumulative) - 1)])

    def _end(self, token: int) -> None:
        if token == self.stop_token:
            self.finish = "stop"
        elif self.pieces:
            before = len(self.text)
            self.text += self.pieces[token] if token < len(self.pieces) else b""
            found = [self.text.find(stop, max(0, before - len(stop))) for stop in self.stop_texts]
            if hits := [place for place in found if place >= 0]:
                self.text, self.finish = self.text[: min(hits)], "stop"
        if self.finish is None and len(self.tokens) >= self.max_tokens:
            self.finish = "length"


def drawn_places(logprobs: Tensor, tokens: Sequence[int], temperature: float) -> list[Draw | None]:
    """Each token's place in its row of log-probabilities [positions, vocab] at a temperature."""
    shares = (logprobs.double() / temperature).softmax(-1)
    places: list[Draw | None] = []
    for row, token in zip(shares, tokens, strict=True):
        own = row[token]
        above = row[row > own].sum()
        places.append(Draw(float(above), float(own)) if bool(own.isfinite()) else None)
    return places


def write_answers(
    session: Session, writers: Sequence[Writer], last_step: Callable[[], StepTaken] = _no_step
) -> None:
    """Let every writer write its answer; all of them decode together until each has ended.

    `last_step` tells the number and the path of the step that was just run.
    """
    requests, logprobs = session.prefill([writer.prompt for writer in writers])
    active = list(range(len(writers)))
    step: StepTaken = (None, "")
    while True:
        rows = logprobs.float().cpu()
        for row, i in enumerate(active):
            writers[i].take(rows[row], step)
        going = [i for i in active if writers[i].finish is None]
        session.finish([requests[i] for i in active if writers[i].finish is not None])
        if not going:
            return
        logprobs = session.decode([requests[i] for i in going], [writers[i].tokens[-1] for i in going])
        step, active = last_step(), going
