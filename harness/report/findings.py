"""Findings as a page shows them, with a link to the line where the repository is known."""

from harness.domain.check import Finding
from harness.domain.plan import Plan
from harness.report.text import plain, source_link
from harness.report.view import FindingView

__all__ = ["finding_view"]


def finding_view(finding: Finding, plan: Plan) -> FindingView:
    """One finding."""
    place, link = "", None
    if finding.path is not None:
        place = plain(finding.path, 300) + ("" if finding.line is None else f":{finding.line}")
        link = source_link(plan.change.repository, plan.change.head, finding.path, finding.line)
    return FindingView(
        rule=plain(finding.rule, 80),
        severity=finding.severity.value,
        message=plain(finding.message, 600),
        place=place,
        link=link,
        excerpt=plain(finding.excerpt, 400),
        remedy=plain(finding.remedy, 600),
        waived=plain(finding.waived or "", 300),
    )
