"""What the gate says about a claim: one row for each proof that the policy demands, and what is missing.

Invariant: a verdict is `admitted` exactly when nothing is missing, nothing contradicts and nothing stood in
the way of judging; the exit code follows from the answer.
"""

from datetime import date
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from harness.domain.bundle import BundleState
from harness.domain.cell import Arch
from harness.domain.change import Sha
from harness.domain.check import CheckId, StageName, Status
from harness.domain.machine import Tier
from harness.domain.record import Digest, Record, Whole
from harness.domain.replication import Repeated

__all__ = [
    "Answer",
    "BundleUse",
    "Contradiction",
    "Contribution",
    "MissingEvidence",
    "ProofRow",
    "ReplicationUse",
    "StaleEvidence",
    "Verdict",
    "WaiverUse",
]


class Answer(StrEnum):
    """The gate's word."""

    ADMITTED = "admitted"
    REJECTED = "rejected"
    COULD_NOT_JUDGE = "could_not_judge"

    @property
    def exit_code(self) -> int:
        """0, 1 or 2."""
        return list(Answer).index(self)


class BundleUse(Record):
    """One bundle that was handed in, and whether its evidence counted."""

    name: str
    bundle_digest: Digest | None
    tier: Tier | None
    arch: Arch | None
    head: Sha | None
    state: BundleState
    signer: str | None
    base: Sha | None = None
    """Where its change begins; isolation judged nothing before it."""
    harness: Digest | None = None
    """Harness that made it, as its plan says."""
    refused: str = ""
    """Why none of its evidence counts; empty where it does."""
    note: str = ""
    """What the gate plans or judges otherwise than the bundle says; empty where nothing differs."""

    def words(self) -> str:
        """The bundle in one line, the same wherever it is shown."""
        parts = [f"of {self.base[:12]}..{self.head[:12]}"] if self.base and self.head else []
        parts += [self.state.value, f"signed by {self.signer}" if self.signer else "unsigned"]
        parts += [f"made with harness {self.harness[:12]}"] if self.harness and not self.note else []
        said = [f"{self.name}: {', '.join(parts)}"]
        said += [f"does not count: {self.refused}"] if self.refused else []
        return "; ".join([*said, *([self.note] if self.note else [])])


class ProofRow(Record):
    """One proof: what the policy demands of one stage on one architecture, and what was found."""

    stage: StageName
    arch: Arch | None
    """None where the stage knows no architecture."""
    required_tier: Tier
    found_tier: Tier | None
    """Weakest tier among the passed checks; None where nothing passed."""
    checks: Whole = Field(ge=0)
    """Required checks that the bundles planned for it."""
    statuses: tuple[tuple[Status, Whole], ...]
    """How many of them gave what, by the strongest evidence of each."""
    stale: Whole = Field(ge=0)
    """Checks whose evidence the new head invalidates."""
    controls: Whole = Field(ge=0)
    """Checks whose control failed as it should."""
    is_met: bool
    why: str = ""
    """What is lacking; empty where the proof is met."""

    @property
    def passed(self) -> int:
        """Checks that passed and are fresh."""
        return dict(self.statuses).get(Status.PASS, 0)


class MissingEvidence(Record):
    """One piece of evidence that would have to be made, and the command that makes it."""

    stage: StageName
    arch: Arch | None
    checks: tuple[CheckId, ...]
    """Which checks; empty: no bundle plans any."""
    why: str
    where: str
    """Machine that the command needs."""
    command: str


class Contribution(Record):
    """What one bundle says about a check."""

    bundle: str
    tier: Tier
    status: Status


class Contradiction(Record):
    """A check that passes in one bundle and fails in another."""

    check: CheckId
    contributions: tuple[Contribution, ...]


class StaleEvidence(Record):
    """A check whose evidence is of an older head, and why the move invalidates it."""

    check: CheckId
    cell: str | None = None
    """Label of its cell; None where it speaks of no cell."""
    bundle: str
    why: str


class ReplicationUse(Record):
    """A bundle that repeats another of those handed in."""

    bundle: str
    repeats: str
    signer: str | None
    answer: Repeated
    why: str = ""
    """What was not replicated, or why nothing could be compared."""


class WaiverUse(Record):
    """A waiver of the policy, and what it covers here."""

    rule: str
    path: str
    owner: str
    reason: str
    expires: date
    findings: Whole = Field(ge=0)
    is_expired: bool


class Verdict(Record):
    """The gate's answer with all its grounds."""

    schema_version: Literal[1] = 1
    answer: Answer
    exit_code: Whole
    policy: str
    claim: str | None
    repository: str | None
    pr: Whole | None
    head: Sha | None
    """Head that was judged."""
    worktree: str = ""
    """Command that puts this head into the folder which the commands of `missing` name; empty where nothing
    is missing.
    """
    reasons: tuple[str, ...]
    """One sentence for each ground, most important first; for an admission, what it rests on."""
    bundles: tuple[BundleUse, ...]
    rows: tuple[ProofRow, ...] = ()
    missing: tuple[MissingEvidence, ...] = ()
    contradictions: tuple[Contradiction, ...] = ()
    stale: tuple[StaleEvidence, ...] = ()
    replications: tuple[ReplicationUse, ...] = ()
    replicated_by: Whole = 0
    """Distinct signers, other than the repeated bundle's own, whose bundles replicated it."""
    waivers: tuple[WaiverUse, ...] = ()

    @model_validator(mode="after")
    def _answer_follows_from_the_grounds(self) -> Self:
        if self.exit_code != self.answer.exit_code:
            raise ValueError(f"{self.answer} has exit code {self.answer.exit_code}, not {self.exit_code}")
        is_lacking = bool(self.missing or self.contradictions) or not all(r.is_met for r in self.rows)
        if self.answer is Answer.ADMITTED and (is_lacking or not self.rows):
            raise ValueError("admitted needs at least one proof, every proof met and no contradiction")
        return self
