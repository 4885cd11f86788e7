"""A bundle's outcomes as JUnit XML, for CI systems that show tests: a suite for each stage, a case for each
check, and a suite for what the gate demands.

Only PASS passes. A required check with any other answer fails its case, as it does the claim; INVALID is an
error, as nothing was compared. What did not run, or was not required, is skipped with its reason.
"""

from collections.abc import Mapping, Sequence
from typing import Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.errors import EvidenceError
from harness.domain.verdict import ProofRow, Verdict
from harness.evidence.reader import Bundle
from harness.evidence.samples import read_header
from harness.report.text import figure_text, plain

__all__ = ["render_junit", "sampling_times"]

COUNTED: Final = ("failure", "error", "skipped")
GATE: Final = "gate"


def render_junit(
    bundle: Bundle, outcomes: Sequence[Outcome], verdict: Verdict, durations_s: Mapping[str, float]
) -> str:
    """The whole file. `outcomes` are those to show: the bundle's, as they were verified; `durations_s` says
    by check how long sampling took, where that is known.
    """
    by_id = {outcome.check: outcome for outcome in outcomes}
    root = Element("testsuites", name=f"fasttrack {_text(bundle.plan.claim.name)}")
    for stage in StageName:
        checks = [c for c in bundle.plan.of_stage(stage) if c.id in by_id]
        if checks:
            suite = SubElement(root, "testsuite", name=stage.value, timestamp=_timestamp(bundle))
            _properties(suite, _conditions(bundle))
            for check in checks:
                _case(suite, check, by_id[check.id], durations_s.get(check.id))
            _count(suite)
    suite = SubElement(root, "testsuite", name=GATE, timestamp=_timestamp(bundle))
    _properties(suite, [("policy", verdict.policy), ("answer", verdict.answer.value)])
    for row in verdict.rows:
        _proof(suite, row)
    if not verdict.rows:
        case = SubElement(suite, "testcase", classname=GATE, name="verdict", time="0")
        words = "; ".join(verdict.reasons)
        SubElement(case, "error", type=verdict.answer.value, message=_text(words))
    _count(suite)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(s.get(name, "0")) for s in root)))
    indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def sampling_times(bundle: Bundle) -> dict[str, float]:
    """Seconds that sampling took, by check; a check whose samples cannot be read has none."""
    times = {}
    for outcome in bundle.outcomes:
        try:
            times[outcome.check] = read_header(bundle.folder, outcome.check).duration_s
        except EvidenceError:
            continue
    return times


def _case(suite: Element, check: Check, outcome: Outcome, duration_s: float | None) -> None:
    subject = check.op or check.subject or "change"
    case = SubElement(
        suite, "testcase", classname=f"{check.stage.value}.{_text(subject, 120)}", name=check.id,
        time=f"{duration_s or 0.0:.3f}",
    )  # fmt: skip
    _properties(
        case,
        [
            ("status", outcome.status.value),
            ("tier", outcome.tier.value),
            ("control", outcome.control.observed if outcome.control else "none"),
            *((figure.name, figure_text(figure)) for figure in outcome.figures),
        ],
    )
    said = _text(f"{outcome.summary}. To do: {outcome.next_step}")
    if outcome.status is Status.PASS:
        SubElement(case, "system-out").text = _text(outcome.summary)
    elif outcome.status is Status.SKIPPED:
        SubElement(case, "skipped", message=said)
    elif not check.is_required:
        SubElement(case, "skipped", message=f"not required: {outcome.status.value}: {said}")
    else:
        kind = "error" if outcome.status is Status.INVALID else "failure"
        found = SubElement(case, kind, type=outcome.status.value, message=said)
        lines = [f"{f.rule} {f.path or ''}:{f.line or ''} {f.message}" for f in outcome.findings]
        found.text = "\n".join(_text(line, 600) for line in [said, *lines[:50]])


def _proof(suite: Element, row: ProofRow) -> None:
    name = row.stage.value if row.arch is None else f"{row.stage.value} on {row.arch}"
    case = SubElement(suite, "testcase", classname=GATE, name=name, time="0")
    if not row.is_met:
        SubElement(case, "failure", type="not_met", message=_text(row.why)).text = _text(row.why)


def _properties(parent: Element, pairs: Sequence[tuple[str, str]]) -> None:
    properties = SubElement(parent, "properties")
    for name, value in pairs:
        SubElement(properties, "property", name=_text(name, 120), value=_text(value, 600))


def _conditions(bundle: Bundle) -> list[tuple[str, str]]:
    """What the figures of a suite are about."""
    plan, machine = bundle.plan, bundle.plan.machine
    return [
        ("bundle", bundle.digest or "unfinished"),
        ("repository", plan.change.repository),
        ("head", plan.change.head),
        ("tier", plan.tier.value),
        ("machine", ", ".join(gpu.name for gpu in machine.gpus) or machine.cpu_model),
    ]


def _timestamp(bundle: Bundle) -> str:
    created = bundle.manifest.created if bundle.manifest else None
    return "" if created is None else created.strftime("%Y-%m-%dT%H:%M:%S")


def _text(text: str, limit: int = 2000) -> str:
    """Text that only reads, without the two characters that XML 1.0 cannot hold."""
    return plain(text, limit).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _count(suite: Element) -> None:
    cases = suite.findall("testcase")
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in COUNTED}
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
