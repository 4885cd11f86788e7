"""Past changes of a repository, judged under one policy or two: what an edit of the rules would decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final, NamedTuple

from harness.domain.change import Change, SourceTree
from harness.domain.check import Severity, Status
from harness.domain.claim import Claim
from harness.domain.machine import Machine, Tier
from harness.domain.pack import Pack
from harness.domain.policy import Policy, Rule, ZoneMap
from harness.domain.record import Record
from harness.domain.stage import PlanRequest, StageContext
from harness.stages.isolation.judging import judge
from harness.stages.isolation.planning import plan
from harness.stages.isolation.sampling import sample_on

__all__ = ["Ruleset", "ReplayReport", "ReplayedChange", "Setting", "replay_change"]

NOWHERE: Final = Path("/nonexistent")
"""Isolation writes no files."""


class Ruleset(NamedTuple):
    """A policy with what it names."""

    policy: Policy
    zones: ZoneMap
    rules: tuple[Rule, ...]


class ReplayedChange(Record):
    """One past change under the new policy, and under the old one where there is one."""

    head: str
    files: int
    new: tuple[tuple[str, str], ...]
    """(check, status)."""
    old: tuple[tuple[str, str], ...] | None = None
    findings: tuple[tuple[str, str, int | None], ...] = ()
    """(rule, path, line) of errors under the new policy."""

    @property
    def differs(self) -> bool:
        """Whether the two policies disagree on whether the change passes."""
        return self.old is not None and _passes(self.old) != _passes(self.new)


class ReplayReport(Record):
    """Past changes, newest first."""

    schema_version: int = 1
    policy: str
    against: str | None
    changes: tuple[ReplayedChange, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same from change to change."""

    pack: Pack
    claim: Claim
    machine: Machine
    today: date
    """Waivers that have ended by then do not count."""


class _Verdict(NamedTuple):
    statuses: tuple[tuple[str, str], ...]
    errors: tuple[tuple[str, str, int | None], ...]


def replay_change(
    change: Change, tree: SourceTree, new: Ruleset, old: Ruleset | None, setting: Setting
) -> ReplayedChange:
    """One change judged under both policies."""
    under_new = _judge(change, tree, new, setting)
    under_old = _judge(change, tree, old, setting) if old is not None else None
    return ReplayedChange(
        head=change.head,
        files=len(change.files),
        new=under_new.statuses,
        old=under_old.statuses if under_old is not None else None,
        findings=under_new.errors,
    )


def _judge(change: Change, tree: SourceTree, rules: Ruleset, setting: Setting) -> _Verdict:
    request = PlanRequest(
        pack=setting.pack, claim=setting.claim, policy=rules.policy, zones=rules.zones, rules=rules.rules,
        change=change, machine=setting.machine, tier=Tier.SMOKE, is_full=False, seed=0,
    )  # fmt: skip
    context = StageContext(
        pack=setting.pack, claim=setting.claim, policy=rules.policy, zones=rules.zones, rules=rules.rules,
        change=change, machine=setting.machine, tier=Tier.SMOKE, tree=tree, cache=NOWHERE, logs=NOWHERE,
        ledger=NOWHERE, progress=_ignore,
    )  # fmt: skip
    outcomes = [judge(check, sample_on(check, context, setting.today)) for check in plan(request)]
    return _Verdict(
        tuple((outcome.check, outcome.status.value) for outcome in outcomes),
        tuple(
            (finding.rule, finding.path or "", finding.line)
            for outcome in outcomes
            for finding in outcome.findings
            if finding.severity is Severity.ERROR and finding.waived is None
        ),
    )


def _passes(statuses: Sequence[tuple[str, str]]) -> bool:
    return all(status == Status.PASS.value for _, status in statuses)


def _ignore(text: str) -> None:
    """Progress of one family is too fine for a replay."""
