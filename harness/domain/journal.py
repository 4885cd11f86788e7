"""What an agent tried: each attempt with its question, its change, what it predicted and what came of it.

Entries are chained: each carries the digest of the one before, so that none can be taken out or rewritten
unseen. Attempts that failed count as much as the one that won, since many tries find a lucky one.
"""

from datetime import datetime
from typing import Literal, Self

from pydantic import Field, model_validator

from harness.domain.check import Status
from harness.domain.record import Digest, Positive, Record, Whole
from harness.domain.tuning import Comparison

__all__ = ["FIRST", "AttemptResult", "CheckRow", "HeldOut", "JournalEntry", "LoopEnding", "LoopResult"]

FIRST = "0" * 64
"""What the first entry carries in place of an earlier one's digest."""


class CheckRow(Record):
    """One check in short."""

    check: str
    status: Status
    summary: str


class HeldOut(Record):
    """What came of checks that the agent cannot see: whether all passed, and how the first failed."""

    is_passed: bool
    kind: str = ""
    """Such as `error_above_bound`, `memory_guard`, `crashed`; empty where all passed."""
    checks: Whole
    """How many there were."""


class AttemptResult(Record):
    """What the judge found of one attempt."""

    attempt: Positive
    accepted: bool
    """Whether it is proved: tests, held-out tests, faster by more than chance, and the policy's verdict."""
    stage: Literal["change", "tests", "held_out", "speed", "verdict", "accepted"]
    """Where it ended."""
    words: str
    next_step: str
    tests: tuple[CheckRow, ...] = ()
    held_out: HeldOut | None = None
    speed: Comparison | None = None
    """Against the best proved so far, at the level that is left for this attempt."""
    over_start: float | None = None
    """Times as fast as what the loop began with: the product of accepted attempts' ratios."""
    verdict: str = ""
    """The gate's answer in a line."""
    sandbox: str = ""
    """What the candidate's process lacked and had."""


class JournalEntry(Record):
    """One line of a journal."""

    schema_version: Literal[1] = 1
    number: Whole
    previous: Digest
    at: datetime
    kind: Literal["begun", "attempt", "fault", "ended"]
    op: str
    question: str = Field(default="", max_length=2000)
    change: Digest | None = None
    """sha256 of the patch against what the loop began with."""
    patch: str = Field(default="", max_length=200_000)
    predicted: str = Field(default="", max_length=2000)
    result: AttemptResult | None = None
    next: str = Field(default="", max_length=2000)
    words: str = Field(default="", max_length=4000)

    @model_validator(mode="after")
    def _attempts_have_results(self) -> Self:
        if (self.kind == "attempt") != (self.result is not None):
            raise ValueError("an attempt has a result, and nothing else has one")
        return self


LoopEnding = Literal[
    "verdict", "attempts", "time", "gpu_time", "plateau", "agent_ended", "agent_failed", "tampered"
]


class LoopResult(Record):
    """How a loop ended, and the best that it proved."""

    schema_version: Literal[1] = 1
    op: str
    ended: LoopEnding
    words: str
    attempts: Whole
    accepted: Whole
    best: Whole | None
    """Number of the best proved attempt; None where nothing was proved."""
    over_start: float
    """Times as fast as at the beginning; 1 where nothing was proved."""
    spent_s: float
    gpu_s: float
    journal_digest: Digest
    """Of the journal's last entry."""
