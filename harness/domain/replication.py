"""What became of a bundle's claims when somebody ran them again: replicated, not replicated, not comparable.

Invariant: a replication is `replicated` when at least one check gave the same again and none gave otherwise;
the exit code follows from the answer.
"""

from enum import StrEnum
from typing import Literal, Self

from pydantic import model_validator

from harness.domain.check import CheckId, Status
from harness.domain.record import Digest, Number, Record, Whole

__all__ = ["CheckReplication", "FigurePair", "Repeated", "Replication"]


class Repeated(StrEnum):
    """The answer, for one check or for all."""

    REPLICATED = "replicated"
    NOT_REPLICATED = "not_replicated"
    NOT_COMPARABLE = "not_comparable"

    @property
    def exit_code(self) -> int:
        """0, 1 or 2."""
        return list(Repeated).index(self)


class FigurePair(Record):
    """A figure that had an interval, and what it was the second time."""

    name: str
    first: Number
    low: Number
    """The first run's interval, widened by the noise floors where the figure has any."""
    high: Number
    second: Number
    second_low: Number | None
    second_high: Number | None
    is_within: bool
    """Whether the second value's interval, or the value where it has none, meets the first's."""


class CheckReplication(Record):
    """One check, twice."""

    check: CheckId
    answer: Repeated
    first: Status | None
    """None where the bundle has no outcome."""
    second: Status | None
    figures: tuple[FigurePair, ...] = ()
    why: str = ""
    """Why it was not replicated or cannot be compared; empty where it was replicated."""


class Replication(Record):
    """A bundle run again."""

    schema_version: Literal[1] = 1
    answer: Repeated
    exit_code: Whole
    first: Digest | None
    """The bundle that was repeated."""
    second: Digest | None
    """The bundle of the repetition, whose plan names the first."""
    conditions: tuple[tuple[str, str, str], ...]
    """(what, first, second) of everything that differs between the runs beside their results."""
    checks: tuple[CheckReplication, ...]
    why: str = ""
    """Why nothing can be compared; empty where something was."""

    @model_validator(mode="after")
    def _answer_follows_from_the_checks(self) -> Self:
        answers = {c.answer for c in self.checks}
        implied = Repeated.NOT_COMPARABLE
        if Repeated.NOT_REPLICATED in answers:
            implied = Repeated.NOT_REPLICATED
        elif Repeated.REPLICATED in answers:
            implied = Repeated.REPLICATED
        if (self.answer, self.exit_code) != (implied, implied.exit_code):
            raise ValueError(f"these checks make it {implied} (exit {implied.exit_code}), not {self.answer}")
        return self
