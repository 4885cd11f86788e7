"""Which waivers of the policy the evidence leans on, and whether they still hold."""

from collections.abc import Sequence
from datetime import date

from pathspec import GitIgnoreSpec

from harness.domain.check import Finding
from harness.domain.policy import Policy, Waiver
from harness.domain.verdict import WaiverUse

__all__ = ["unheld", "waiver_uses"]


def waiver_uses(policy: Policy, findings: Sequence[Finding], today: date) -> tuple[WaiverUse, ...]:
    """Every waiver of the policy with the number of waived findings that it covers."""
    return tuple(
        WaiverUse(
            rule=waiver.rule,
            path=waiver.path,
            owner=waiver.owner,
            reason=waiver.reason,
            expires=waiver.expires,
            findings=sum(f.waived is not None and _covers(waiver, f) for f in findings),
            is_expired=waiver.expires < today,
        )
        for waiver in policy.waivers
    )


def unheld(policy: Policy, findings: Sequence[Finding], today: date) -> tuple[Finding, ...]:
    """Findings that were waived when they were judged, and that no waiver in force covers today."""
    in_force = [w for w in policy.waivers if w.expires >= today]
    return tuple(f for f in findings if f.waived is not None and not any(_covers(w, f) for w in in_force))


def _covers(waiver: Waiver, finding: Finding) -> bool:
    if waiver.rule != finding.rule or finding.path is None:
        return False
    return GitIgnoreSpec.from_lines([waiver.path]).match_file(finding.path)
