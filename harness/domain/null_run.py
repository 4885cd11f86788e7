"""Runs of stock against itself, time after time: how often a cell's verdict accuses where nothing differs.

Invariant: everything a repeat says follows from its times, which the record carries, so that anyone can judge
them again.
"""

from math import comb
from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from harness.domain.check import Check, Status
from harness.domain.machine import Machine
from harness.domain.record import Digest, Record

__all__ = ["NullRepeat", "NullRun"]

SURPRISE = 0.05
"""Chance below which so many false alarms are no accident at the stated rate."""
ARMS = ("stock", "optimised", "null", "slow")


class NullRepeat(Record):
    """One cell whose arms are all stock; `optimised` has only the name."""

    status: Status
    """FAIL is a false alarm."""
    ratio: float
    low: float
    high: float
    noise: float
    is_planted_seen: bool
    """Whether the planted slow-down of the same repeat was told for sure."""
    times_us: tuple[tuple[float, ...], ...]
    """By arm, in the order `stock`, `optimised`, `null`, `slow`."""

    @model_validator(mode="after")
    def _has_all_arms(self) -> Self:
        if len(self.times_us) != len(ARMS):
            raise ValueError(f"times of {len(self.times_us)} arms, not of {', '.join(ARMS)}")
        return self

    @property
    def excludes_one(self) -> bool:
        """Whether the ratio's interval alone says that equal arms differ."""
        return not self.low <= 1 <= self.high


class NullRun(Record):
    """Repeats of one cell on one machine."""

    schema_version: Literal[1] = 1
    harness_digest: Digest
    created: AwareDatetime
    machine: Machine
    check: Check
    """What is repeated, with its thresholds."""
    work: str
    """What stock was."""
    repeats: tuple[NullRepeat, ...] = Field(min_length=1)

    @property
    def rate(self) -> float:
        """The stated chance of a false alarm in one repeat."""
        return self.check.number("alpha")

    @property
    def alarms(self) -> int:
        """Repeats that accuse stock of being slower than itself."""
        return sum(repeat.status is Status.FAIL for repeat in self.repeats)

    @property
    def is_inside(self) -> bool:
        """Whether so many alarms are no surprise at the stated rate."""
        n, p = len(self.repeats), self.rate
        more = sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(self.alarms, n + 1))
        return more >= SURPRISE

    def words(self) -> str:
        """One sentence."""
        n = len(self.repeats)
        undecided = sum(repeat.status is Status.INCONCLUSIVE for repeat in self.repeats)
        apart = sum(repeat.excludes_one for repeat in self.repeats)
        seen = sum(repeat.is_planted_seen for repeat in self.repeats)
        return (
            f"{self.alarms} of {n} runs of stock against itself are false alarms ({undecided} undecided), "
            f"{'inside' if self.is_inside else 'OUTSIDE'} the stated rate of {self.rate:.0%}; the intervals "
            f"of {apart} leave out 1; the planted slow-down was told in {seen}"
        )
