"""What the findings of one family amount to. Pure: samples in, outcome out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from harness.domain.check import Check, Control, Figure, Finding, Outcome, Samples, Severity, Status
from harness.domain.record import Scalar
from harness.domain.table_shape import misshapen, unusable
from harness.stages.isolation.tables import SHAPES

__all__ = ["SIZE_BANDS", "judge"]

SIZE_BANDS: Final = ((50, "under 50"), (251, "50 to 250"))
"""vLLM's bands of added lines without tests and documentation: under 50, to 250, above."""
UNCOUNTED_ZONES: Final = ("tests", "docs")
MAX_FINDINGS: Final = 500
"""Findings that an outcome carries, errors first; the samples hold all of them."""

Rows = Sequence[Mapping[str, Scalar]]


def judge(check: Check, samples: Samples) -> Outcome:
    """FAIL for an error that nobody waived; PASS only where every planted violation was caught."""
    if unfit := misshapen(samples, SHAPES):
        return unusable(check, samples, unfit)
    files, planted = _rows(samples, "files"), _rows(samples, "planted")
    control = _control(planted)
    errors = [f for f in samples.findings if f.severity is Severity.ERROR and f.waived is None]
    status, summary, next_step = _verdict(check, samples, files, planted, errors)
    return Outcome(
        check=check.id,
        status=status,
        tier=samples.tier,
        summary=summary,
        next_step=next_step,
        control=control,
        figures=_figures(check, samples, files),
        findings=_shown(samples.findings),
    )


def _verdict(
    check: Check, samples: Samples, files: Rows, planted: Rows, errors: Sequence[Finding]
) -> tuple[Status, str, str]:
    missed = [row for row in planted if not row["is_right"]]
    if samples.ended != "ran":
        return (
            Status.FAIL,
            f"reading the change {samples.ended}: {samples.detail}",
            "report this with the change",
        )
    if missed or not any(row["expected"] for row in planted):
        names = ", ".join(f"{row['rule']} on {row['example']!r}" for row in missed[:3]) or "none was planted"
        return (
            Status.NO_EVIDENCE,
            f"{len(missed)} of {len(planted)} planted files were misjudged ({names}): silence proves nothing",
            "run `fasttrack policy check` and mend the rules or the zone map that it names",
        )
    if not files:
        return Status.NO_EVIDENCE, "the change is empty", "name a base and a head that differ"
    if errors:
        first = errors[0]
        place = f"{first.path}:{first.line}" if first.line else str(first.path)
        paths = len({finding.path for finding in errors})
        return (
            Status.FAIL,
            f"{_count(len(errors), 'error')} in {_count(paths, 'file')}; first {first.rule} at {place}",
            first.remedy or "remove what the findings name, or ask the gatekeepers for a waiver",
        )
    added = _counted_lines(files)
    if check.subject == "blast_radius" and added > check.number("max_added_lines"):
        return (
            Status.FAIL,
            f"{added} lines were added outside tests and docs, over {check.number('max_added_lines'):.0f}",
            "split the change, so that each part can be judged",
        )
    return Status.PASS, _silence(check, samples, files, added), ""


def _silence(check: Check, samples: Samples, files: Rows, added: int) -> str:
    judged = sum(1 for row in files if row["is_judged"])
    waived = sum(1 for finding in samples.findings if finding.waived is not None)
    notes = sum(1 for f in samples.findings if f.severity is not Severity.ERROR)
    extra = f", {waived} waived" * bool(waived) + f", {_count(notes, 'warning')}" * bool(notes)
    if check.subject == "zones":
        zones = Counter(str(row["zone"]) for row in files)
        return (
            "touches "
            + ", ".join(f"{_count(n, 'file')} of {zone}" for zone, n in sorted(zones.items()))
            + extra
        )
    if check.subject == "blast_radius":
        return f"{added} lines added outside tests and docs ({_band(added)}){extra}"
    rules = len(_rows(samples, "rules"))
    return (
        f"no error from {_count(rules, 'rule')} over {judged} of {_count(len(files), 'changed file')}{extra}"
    )


def _control(planted: Rows) -> Control:
    violations = [row for row in planted if row["expected"]]
    caught = sum(1 for row in violations if row["is_right"])
    clean = len(planted) - len(violations)
    quiet = sum(1 for row in planted if not row["expected"] and row["is_right"])
    return Control(
        kind="planted",
        description="files with a violation of each rule, and files without one, through the same code",
        failed=bool(violations) and caught == len(violations) and quiet == clean,
        observed=f"{caught} of {len(violations)} violations caught, {quiet} of {clean} clean files passed",
    )


def _figures(check: Check, samples: Samples, files: Rows) -> tuple[Figure, ...]:
    errors = [f for f in samples.findings if f.severity is Severity.ERROR]
    figures = [
        Figure(name="changed_files", value=len(files)),
        Figure(name="judged_files", value=sum(1 for row in files if row["is_judged"])),
        Figure(name="errors", value=sum(1 for f in errors if f.waived is None)),
        Figure(name="waived_errors", value=sum(1 for f in errors if f.waived is not None)),
        Figure(name="warnings", value=sum(1 for f in samples.findings if f.severity is Severity.WARNING)),
        Figure(name="duration_s", value=samples.duration_s),
    ]
    if check.subject == "zones":
        figures += _zone_figures(files)
    if check.subject == "blast_radius":
        added = _counted_lines(files)
        figures.append(Figure(name="added_code_lines", value=added, note=_band(added)))
        figures += _radius_figures(samples)
    if check.subject == "opt_in":
        figures.append(_selection_figure(_rows(samples, "selection")))
        figures += _graph_figures(samples)
    return tuple(figures)


def _zone_figures(files: Rows) -> list[Figure]:
    """Files and added lines of each zone that the change touches."""
    figures = []
    for zone in sorted({str(row["zone"]) for row in files}):
        rows = [row for row in files if row["zone"] == zone]
        added = sum(int(row["added_lines"] or 0) for row in rows)
        figures += [
            Figure(name=f"files_{zone}", value=len(rows)),
            Figure(name=f"added_lines_{zone}", value=added),
        ]
    return figures


def _selection_figure(places: Rows) -> Figure:
    selections = [row for row in places if row["role"] == "selection"]
    if not selections:
        return Figure(
            name="selection_places", value=None, missing="no model code at head reads the switch by its name"
        )
    graph = "; ".join(f"{row['role']} {row['path']}:{row['line']}" for row in places)
    return Figure(name="selection_places", value=len(selections), note=graph[:2000])


def _graph_figures(samples: Samples) -> list[Figure]:
    """Declines, and the places where a step goes back to stock."""
    if samples.table("opt_in_graph") is None:  # samples of a version that did not draw it
        return []
    places = _rows(samples, "opt_in_graph")
    return [
        Figure(name=f"{role}_places", value=sum(1 for row in places if row["role"] == role))
        for role in ("decline", "return")
    ]


def _radius_figures(samples: Samples) -> list[Figure]:
    """Who can import the change, and the share of it that tests import."""
    if samples.table("reach_by_zone") is None:  # samples of a version that did not measure it
        return []
    missing = next((str(row["reason"]) for row in _rows(samples, "radius_missing")), None)
    zones, exercised = _rows(samples, "reach_by_zone"), _rows(samples, "exercised")
    figures = [
        Figure(name="modules_reaching_before", value=_total(zones, "before", missing), missing=missing),
        Figure(name="modules_reaching_after", value=_total(zones, "after", missing), missing=missing),
        Figure(name="altered_public_functions", value=len(_rows(samples, "altered"))),
    ]
    total = sum(int(row["added_lines"] or 0) for row in exercised)
    direct = sum(int(row["added_lines"] or 0) for row in exercised if row["direct_tests"])
    reached = sum(int(row["added_lines"] or 0) for row in exercised if row["is_reached"])
    why = missing or (None if total else "no line of Python code was added")
    note = f"of {total} added lines of Python code, by imports; what a test executes is not known here"
    shares = [("share_imported_by_tests", direct), ("share_reached_by_tests", reached)]
    if samples.table("named") is not None:  # samples of a version that did not measure it
        shares.append(("share_named_by_tests", _total(_rows(samples, "named"), "named_lines", None) or 0))
    for name, lines in shares:
        share = None if why or not total else round(lines / total, 4)
        told = note if name != "share_named_by_tests" else note.replace("by imports", "by names in tests")
        figures.append(Figure(name=name, value=share, missing=why, note=told))
    return figures


def _total(rows: Rows, column: str, missing: str | None) -> int | None:
    return None if missing else sum(int(row[column] or 0) for row in rows)


def _counted_lines(files: Rows) -> int:
    judged = [row for row in files if row["is_judged"] and row["zone"] not in UNCOUNTED_ZONES]
    return sum(int(row["added_lines"] or 0) for row in judged)


def _band(added: int) -> str:
    return next((name for limit, name in SIZE_BANDS if added < limit), "above 250")


def _shown(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Every finding up to the limit; beyond it errors are kept before the rest, order unchanged."""
    if len(findings) <= MAX_FINDINGS:
        return tuple(findings)
    ranked = sorted(range(len(findings)), key=lambda i: findings[i].severity is not Severity.ERROR)
    return tuple(findings[i] for i in sorted(ranked[:MAX_FINDINGS]))


def _rows(samples: Samples, name: str) -> Rows:
    table = samples.table(name)
    return table.records() if table is not None else ()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
