"""What a stage is handed, and what it offers.

A stage module has four functions: `plan` (pure: which checks the policy, claim, change and machine call for),
`sample` (runs the candidate, light), `judge` (pure: samples to outcome) and `run` (`sample` then `judge`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.domain.change import Change, SourceTree
from harness.domain.check import Check, Outcome, Samples
from harness.domain.claim import Claim
from harness.domain.machine import Machine, Tier
from harness.domain.pack import Pack
from harness.domain.policy import Policy, Rule, ZoneMap

__all__ = ["PlanRequest", "Stage", "StageContext"]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything that decides which checks a stage plans."""

    pack: Pack
    claim: Claim
    policy: Policy
    zones: ZoneMap
    rules: tuple[Rule, ...]
    change: Change
    machine: Machine
    tier: Tier
    is_full: bool
    seed: int
    """From head SHA and nonce; checks derive their own from it."""


@dataclass(frozen=True, slots=True)
class StageContext:
    """What `sample` may use. `tree` is None on a worker, whose checks need no repository."""

    pack: Pack
    claim: Claim
    policy: Policy
    zones: ZoneMap
    rules: tuple[Rule, ...]
    change: Change
    machine: Machine
    tier: Tier
    tree: SourceTree | None
    cache: Path
    """Folder for compiled kernels and the like; may be deleted between runs."""
    logs: Path
    """Folder whose files travel in the bundle."""
    ledger: Path
    """Folder of the dispatcher's ledgers; travels in the bundle."""
    progress: Callable[[str], None]
    """Tell people what is being done now; at most a few calls a second."""
    checks: tuple[Check, ...] = ()
    """All checks of the plan; what one of them prepares may serve the others."""
    mark: Callable[[str], object] = lambda _word: None
    """Tell whoever holds the clock outside of this process that a stretch of work begins or ends
    (`executors.marks`)."""


class Stage(Protocol):
    """The functions of a stage module."""

    def plan(self, request: PlanRequest) -> tuple[Check, ...]: ...

    def sample(self, check: Check, context: StageContext) -> Samples: ...

    def judge(self, check: Check, samples: Samples) -> Outcome: ...

    def run(self, check: Check, context: StageContext) -> Outcome: ...
