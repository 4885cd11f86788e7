"""A bundle's findings as SARIF 2.1.0, for tools that put findings beside the lines they are about.

A finding is a result; one that a waiver covers is a suppressed result. An outcome that is no finding about a
line (a check that did not pass) is a notification of the run. Text of the bundle goes through `plain`, and a
path that leaves the repository gets no location that a reader's tool could open.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from harness import __version__
from harness.domain.check import Check, Finding, Outcome, Severity, Status
from harness.domain.plan import Plan
from harness.domain.verdict import Verdict
from harness.evidence.reader import Bundle
from harness.report.text import plain, repository_link

__all__ = ["render_sarif"]

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
ROOT: Final = "SRCROOT"
Json = dict[str, Any]


def render_sarif(bundle: Bundle, outcomes: Sequence[Outcome], verdict: Verdict) -> str:
    """One SARIF log with one run. `outcomes` are those to show: the bundle's, as they were verified."""
    checks = {check.id: check for check in bundle.plan.checks}
    found = [(checks[o.check], f) for o in outcomes if o.check in checks for f in o.findings]
    rules = {rule.id: rule for rule in bundle.plan.rules}
    names = list(dict.fromkeys(finding.rule for _, finding in found))
    driver: Json = {
        "name": "fasttrack",
        "semanticVersion": __version__,
        "rules": [
            _rule(name, rules[name].rationale if name in rules else "", _remedy(name, found))
            for name in names
        ],
    }
    run: Json = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"fasttrack/{verdict.policy}/{bundle.plan.claim.name}/"},
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": verdict.exit_code,
                "toolExecutionNotifications": list(_notifications(outcomes, checks, verdict)),
            }
        ],
        "versionControlProvenance": list(_provenance(bundle.plan)),
        "columnKind": "unicodeCodePoints",
        "results": [_result(check, finding, names) for check, finding in found],
        "properties": {
            "answer": verdict.answer.value,
            "bundleDigest": bundle.digest,
            "head": bundle.plan.change.head,
            "tier": bundle.plan.tier.value,
        },
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _rule(name: str, rationale: str, remedy: str) -> Json:
    rule: Json = {"id": plain(name, 120), "name": plain(name, 120)}
    if rationale:
        rule["fullDescription"] = {"text": plain(rationale, 1000)}
    if remedy:
        rule["help"] = {"text": plain(remedy, 1000)}
    return rule


def _remedy(name: str, found: Sequence[tuple[Check, Finding]]) -> str:
    return next((f.remedy for _, f in found if f.rule == name and f.remedy), "")


def _result(check: Check, finding: Finding, names: Sequence[str]) -> Json:
    message = plain(finding.message, 2000) + (f" To do: {plain(finding.remedy)}" if finding.remedy else "")
    logical = {"fullyQualifiedName": check.id, "kind": "module"}
    location: Json = {"logicalLocations": [logical]}
    if (uri := _uri(finding.path)) is not None:
        place: Json = {"artifactLocation": {"uri": uri, "uriBaseId": ROOT}}
        if finding.line is not None and finding.line > 0:
            place["region"] = {"startLine": finding.line}
            if finding.excerpt:
                place["region"]["snippet"] = {"text": plain(finding.excerpt, 400)}
        location["physicalLocation"] = place
    result: Json = {
        "ruleId": plain(finding.rule, 120),
        "ruleIndex": names.index(finding.rule),
        "level": LEVELS[finding.severity],
        "message": {"text": message},
        "locations": [location],
        "partialFingerprints": {"finding/v1": _fingerprint(check, finding)},
    }
    if finding.waived is not None:
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": plain(finding.waived, 600)}
        ]
    return result


def _fingerprint(check: Check, finding: Finding) -> str:
    """The same for the same finding at another line, so that a moved line is no new finding."""
    parts = (check.id, finding.rule, finding.path or "", finding.excerpt or finding.message)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _uri(path: str | None) -> str | None:
    """A repository path as a relative reference; None for one that is not inside a repository."""
    if path is None or path.startswith("/") or "\\" in path or ".." in path.split("/"):
        return None
    return quote(path.encode("utf-8", "surrogatepass"), safe="/")


def _notifications(outcomes: Sequence[Outcome], checks: dict[str, Check], verdict: Verdict) -> Iterator[Json]:
    """What stands in the way: each check that did not pass, then the gate's reasons."""
    for outcome in outcomes:
        check = checks.get(outcome.check)
        if check is None or outcome.status is Status.PASS:
            continue
        is_weak = outcome.status is Status.SKIPPED or not check.is_required
        yield {
            "level": "note" if is_weak else "error",
            "message": {
                "text": f"{outcome.status.value} {outcome.check}: {plain(outcome.summary, 1000)}. "
                f"To do: {plain(outcome.next_step, 1000)}"
            },
            "descriptor": {"id": outcome.status.value},
        }
    for reason in verdict.reasons:
        yield {
            "level": "note" if verdict.exit_code == 0 else "error",
            "message": {"text": f"gate: {plain(reason)}"},
            "descriptor": {"id": f"gate/{verdict.answer.value}"},
        }


def _provenance(plan: Plan) -> Iterator[Json]:
    link = repository_link(plan.change.repository)
    if link is not None:
        yield {"repositoryUri": link, "revisionId": plan.change.head, "mappedTo": {"uriBaseId": ROOT}}
