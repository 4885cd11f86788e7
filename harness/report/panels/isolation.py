"""Isolation: findings, zones, how the path is chosen and left, and who can reach the change."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pathspec import GitIgnoreSpec

from harness.domain.change import ChangedFile
from harness.domain.plan import Plan
from harness.domain.record import Scalar
from harness.report.findings import finding_view
from harness.report.panels.material import Material, table
from harness.report.panels.opt_in_drawing import Step, draw_steps
from harness.report.text import plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

MAX_NAMED_FILES = 6
MAX_SHOWN = 60
Rows = Sequence[Mapping[str, Scalar]]


def panels(material: Material) -> tuple[Panel, ...]:
    """Findings first, then the zone table."""
    findings = tuple(
        finding_view(finding, material.plan) for _, outcome in material.pairs for finding in outcome.findings
    )
    return (
        Panel(
            "Findings",
            "Errors fail their check; waived ones say who took them and until when.",
            findings=findings,
        ),
        _zone_panel(material.plan),
        _opt_in_panel(material),
        _reach_panel(material),
        _newly_panel(material),
        _exercised_panel(material),
        _altered_panel(material),
    )


def _zone_panel(plan: Plan) -> Panel:
    zones = [(z.name, GitIgnoreSpec.from_lines(z.globs)) for z in plan.zones.zones]
    by_zone: dict[str, list[ChangedFile]] = defaultdict(list)
    for file in plan.change.files:
        zone = next((name for name, globs in zones if globs.match_file(file.path)), "unknown")
        by_zone[zone].append(file)
    rows = []
    for zone, files in sorted(by_zone.items(), key=lambda item: -sum(f.added_lines for f in item[1])):
        is_allowed = zone in plan.policy.allowed_zones
        names = ", ".join(plain(f.path, 90) for f in files[:MAX_NAMED_FILES])
        more = f" and {len(files) - MAX_NAMED_FILES} more" if len(files) > MAX_NAMED_FILES else ""
        rows.append(
            (
                CellView(zone.replace("_", " ")),
                CellView(f"{len(files)}"),
                CellView(f"+{sum(f.added_lines for f in files)}"),
                CellView(f"-{sum(f.removed_lines for f in files)}"),
                CellView(
                    "open to the pack" if is_allowed else "not open to the pack", "" if is_allowed else "warn"
                ),
                CellView(names + more, "small"),
            )
        )
    return Panel(
        "What the change touches",
        f"Zones of {plan.zones.name}; the policy says which of them a pack may change.",
        table("zone | #files | #added | #removed | policy | paths", rows),
    )


def _rows(material: Material, subject: str, name: str) -> Rows:
    """A table of the check on one family; empty where the bundle has none."""
    for check, _ in material.pairs:
        if check.subject == subject and (samples := material.samples(check.id)) is not None:
            found = samples.table(name)
            return found.records() if found is not None else ()
    return ()


def _opt_in_panel(material: Material) -> Panel:
    rows = _rows(material, "opt_in", "opt_in_graph")
    steps = [
        Step(
            str(row["role"]),
            f"{plain(str(row['path']), 200)}:{row['line']}",
            plain(str(row["text"]), 120),
            tuple(plain(part, 220) for part in str(row["leads_to"]).split(", ") if part),
        )
        for row in rows
    ]
    cells = [
        (
            CellView(step.role),
            CellView(step.where, "small"),
            CellView(step.text, "small"),
            CellView(", ".join(step.leads_to) or "-", "small"),
        )
        for step in steps[:MAX_SHOWN]
    ]
    return Panel(
        "From selection to return",
        "Each place that reads the switch, what keeps the choice, the conditions on it, and where a step "
        "goes back to stock; read from the model code at head.",
        table("role | place | code | leads to", cells) if cells else None,
        svg=draw_steps(steps, "from the selection of the optimised path to the return to stock")
        if steps
        else None,
    )


def _reach_panel(material: Material) -> Panel:
    rows = _rows(material, "blast_radius", "reach_by_zone")
    cells = [
        (
            CellView(plain(str(row["zone"]), 40).replace("_", " ")),
            CellView(f"{row['modules']:,}"),
            CellView(f"{row['before']:,}"),
            CellView(f"{row['after']:,}", "warn" if _number(row["after"]) > _number(row["before"]) else ""),
        )
        for row in rows
    ]
    return Panel(
        "Who can import the change",
        "Modules that import a changed one, directly or not, before and after; by import statements and by "
        "names of modules in strings.",
        table("zone | #modules | #before | #after", cells) if cells else None,
    )


def _newly_panel(material: Material) -> Panel:
    rows = [
        r
        for r in _rows(material, "blast_radius", "newly_reaching")
        if r["zone"] not in ("tests", "model_code")
    ]
    cells = [
        (
            CellView(plain(str(row["zone"]), 40).replace("_", " ")),
            CellView(plain(str(row["path"]), 160), "small"),
            CellView(plain(str(row["chain"]), 400), "small"),
        )
        for row in rows[:MAX_SHOWN]
    ]
    return Panel(
        "Modules outside the model that reach it for the first time",
        "With the shortest way there; none of them could import any changed module before.",
        table("zone | module | by way of", cells) if cells else None,
    )


def _exercised_panel(material: Material) -> Panel:
    rows = sorted(
        _rows(material, "blast_radius", "exercised"),
        key=lambda r: (_number(r["direct_tests"]) > 0, str(r["path"])),
    )
    cells = [
        (
            CellView(plain(str(row["path"]), 160), "small"),
            CellView(f"+{row['added_lines']}"),
            CellView(f"{row['direct_tests']}", "" if row["direct_tests"] else "warn"),
            CellView("yes" if row["is_reached"] else "no", "" if row["is_reached"] else "warn"),
        )
        for row in rows[:MAX_SHOWN]
    ]
    return Panel(
        "What tests import of the change",
        "Files that no test imports come first. An import is the least that a test needs; what it executes "
        "is not known here.",
        table("file | #added | #tests that import it | some test reaches it", cells) if cells else None,
    )


def _altered_panel(material: Material) -> Panel:
    rows = _rows(material, "blast_radius", "altered")
    cells = [
        (
            CellView(plain(str(row["name"]), 120)),
            CellView(plain(str(row["what"]), 160)),
            CellView(
                plain(f"{row['path']}:{row['line']}" if row["line"] else str(row["path"]), 200), "small"
            ),
        )
        for row in rows[:MAX_SHOWN]
    ]
    return Panel(
        "Public functions and defaults that changed",
        "What callers of the changed files meet differently, model code included.",
        table("name | change | place", cells) if cells else None,
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
