"""What an eval asks of whatever serves a model, and what it gets back: the same for a model in this process
and for a server behind a URL.

An engine opens one arm at a time or several at once; an open arm answers a batch of requests together, so
that the batch size is the caller's. Answers carry what judging needs beside the text: tokens,
log-probabilities of the likeliest tokens, how the answer ended and, where the engine has a ledger, which
step produced each token. A request that failed is a reply that says so, never an empty answer.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, Self

from pydantic import Field

from harness.domain.cell_tokens import context_power
from harness.domain.pack import Decision
from harness.domain.record import Number, Positive, Record, Whole, canonical_bytes, sha256_hex

__all__ = ["FAILED", "ArmServer", "Ask", "Engine", "Finish", "Message", "Reply", "StepTotal"]

Finish = Literal["stop", "length", "error", "refusal", "transport"]
"""`error`: a log-probability was not finite; `refusal`: the server declined; `transport`: no whole answer
came.
"""
FAILED: tuple[Finish, ...] = ("error", "refusal", "transport")


class Message(Record):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Ask(Record):
    """One request. Exactly one of `messages`, `text` and `tokens` is the prompt."""

    item: str
    repeat: Whole = 0
    """Which of several answers to the same prompt; each has its own draws."""
    messages: tuple[Message, ...] = ()
    text: str = ""
    tokens: tuple[Whole, ...] = ()
    max_tokens: Positive
    temperature: Number = Field(default=0, ge=0)
    """0: the likeliest token."""
    seed: Whole = 0
    """With item and repeat it decides every draw: both arms draw with the same numbers."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer and are no part of it."""
    answer_schema: str = ""
    """JSON Schema that the answer must follow; empty: none."""

    def prompt_digest(self) -> str:
        """sha256 of the prompt, so that two arms can be held to the same question."""
        messages = [message.model_dump() for message in self.messages]
        return sha256_hex(canonical_bytes([messages, self.text, list(self.tokens)]))


class Reply(Record):
    """What came back for one request. Tuples over positions have one length, or are empty where unknown."""

    item: str
    repeat: Whole = 0
    text: str
    tokens: tuple[Whole, ...]
    """Generated token ids, a stop token included."""
    finish: Finish
    detail: str = ""
    """What a failed request said."""
    prompt_tokens: Whole
    likeliest: tuple[tuple[tuple[Whole, Number], ...], ...] = ()
    """By position: some of the likeliest tokens and their natural log-probabilities at temperature 1, the
    generated one among them.
    """
    steps: tuple[Whole | None, ...] = ()
    """By position: number of the step in the arm's ledger; None for what a prefill gave."""
    paths: tuple[str, ...] = ()
    """By position: `path/reason` of that step."""


class StepTotal(NamedTuple):
    """Steps of one kind; an arm's totals are its ledger, summed up."""

    phase: str
    path: str
    reason: str
    requests: int
    """In the step: the batch that was really reached."""
    context: int = 0
    """Power of two at or below the step's shortest context; 0 where nobody told."""
    drafts: int = 0

    @classmethod
    def of(cls, decision: Decision) -> Self:
        """The kind of a dispatcher's decision."""
        is_verify = decision.phase == "verify"
        return cls(
            decision.phase,
            decision.path,
            decision.reason,
            decision.requests,
            context_power(decision.context_min),
            decision.rows - 1 if is_verify else 0,
        )


class ArmServer(Protocol):
    """One arm, ready to answer."""

    def answer(self, asks: Sequence[Ask]) -> tuple[Reply, ...]:
        """Replies in the order asked; all asks are in flight together, so their number is the batch."""

    def ledger(self) -> dict[StepTotal, int]:
        """Tokens by kind of step since the arm opened; empty where nothing tells."""

    def counters(self) -> dict[str, int]:
        """Since the arm opened: `prefix_queries`, `prefix_hits`, `drafted`, `accepted`, and whatever else the
        engine counts. A name that is absent was not counted.
        """


class Engine(Protocol):
    """How a model is served."""

    @property
    def name(self) -> str:
        """`in-process`, `vllm`."""

    @property
    def is_concurrent(self) -> bool:
        """Whether several arms may be open at once, so that their requests alternate in time."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms that it can open: `stock`, `optimised`, and `poison` where it can plant one."""

    def open(self, arm: str) -> AbstractContextManager[ArmServer]:
        """The arm, from a cold start: no prefix is cached. What it holds is freed whatever happens."""

    def description(self, arm: str) -> tuple[tuple[str, str], ...]:
        """Everything that decides how the arm runs, by name: model, command line, versions. No host paths."""
