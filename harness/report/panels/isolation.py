"""Isolation: what the change touches by zone, and what was found in it."""

from collections import defaultdict

from pathspec import GitIgnoreSpec

from harness.domain.change import ChangedFile
from harness.domain.plan import Plan
from harness.report.findings import finding_view
from harness.report.panels.material import Material, table
from harness.report.text import plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

MAX_NAMED_FILES = 6


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
