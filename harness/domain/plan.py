"""policy x claim x change x machine: what will be checked.

Printed before anything runs; outcomes are bound to its digest.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from harness.domain.change import Change
from harness.domain.check import Check, CheckId, StageName
from harness.domain.claim import Claim
from harness.domain.machine import Machine, Tier
from harness.domain.policy import Policy, Rule, ZoneMap
from harness.domain.record import Digest, Record

__all__ = ["Plan", "is_within"]


class Plan(Record):
    """Everything that decides what runs; two runs with equal digests ask the same questions."""

    schema_version: Literal[1] = 1
    harness_version: str
    harness_digest: Digest
    """sha256 over the harness's own source files, so that an edited judge is another judge."""
    pack: str
    pack_digest: Digest
    """sha256 over the pack's source files as they are on disk."""
    claim: Claim
    policy: Policy
    zones: ZoneMap
    rules: tuple[Rule, ...]
    """In the plan, so that a rule edited between planning and judging is another plan."""
    change: Change
    """Without hunks: `change_digest` binds them, and a bundle need not carry the whole diff."""
    change_digest: Digest
    machine: Machine
    tier: Tier
    is_full: bool = False
    only: tuple[str, ...] = ()
    """Words that narrow the plan on purpose: check ids, ops, subjects, cells by their labels; empty: all.
    What they leave out is nobody's evidence, and the gate asks for it all the same.
    """
    replicates: Digest | None = None
    """Bundle that this run repeats, by the digest of its manifest; None for a run of its own."""
    nonce: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Fixed at plan time and recorded: with the head SHA it gives every seed, so inputs cannot be known
    beforehand.
    """
    checks: tuple[Check, ...]

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        ids = [c.id for c in self.checks]
        if len(set(ids)) != len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise ValueError(f"plan has two checks with one id: {', '.join(twice[:5])}")
        return self

    def holds(self, check: Check) -> bool:
        """Whether a check that claim and policy call for is within the words that narrow this plan."""
        return is_within(check, self.only)

    @property
    def required(self) -> tuple[CheckId, ...]:
        """Ids of required checks, in plan order."""
        return tuple(c.id for c in self.checks if c.is_required)

    def of_stage(self, stage: StageName) -> tuple[Check, ...]:
        """Checks of one stage, in plan order."""
        return tuple(c for c in self.checks if c.stage is stage)


def is_within(check: Check, only: Sequence[str]) -> bool:
    """Whether any word names the check, its op, its subject or its cell; every check is within no words."""
    cell = None if check.cell is None else check.cell.label()
    return not only or bool({check.id, check.op, check.subject, cell}.intersection(only))
