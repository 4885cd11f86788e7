"""The tables of an isolation check."""

from collections.abc import Mapping

from harness.domain.table_shape import COUNT, FLAG, TEXT, TableShape, choice, optional

__all__ = ["SHAPES"]

ROLES = ("selection", "default", "carrier", "state", "guard", "left", "decline", "return")

SHAPES: Mapping[str, TableShape] = {
    "files": TableShape(
        {
            "path": TEXT,
            "old_path": optional(TEXT),
            "zone": TEXT,
            "old_zone": optional(TEXT),
            "is_pack": FLAG,
            "is_judged": FLAG,
            "status": TEXT,
            "kind": TEXT,
            "added_lines": COUNT,
            "removed_lines": COUNT,
        },
        key=("path",),
    ),
    "rules": TableShape({"rule": TEXT, "severity": TEXT, "files_read": COUNT, "findings": COUNT}),
    "planted": TableShape({"rule": TEXT, "example": TEXT, "expected": FLAG, "found": FLAG, "is_right": FLAG}),
    "selection": TableShape({"role": TEXT, "path": TEXT, "line": optional(COUNT), "text": TEXT}),
    "opt_in_graph": TableShape(
        {"role": choice(*ROLES), "path": TEXT, "line": COUNT, "text": TEXT, "leads_to": TEXT},
        key=("role", "path", "line"),
    ),
    "reach_by_zone": TableShape(
        {"zone": TEXT, "modules": COUNT, "before": COUNT, "after": COUNT}, key=("zone",)
    ),
    "newly_reaching": TableShape({"path": TEXT, "zone": TEXT, "chain": TEXT}, key=("path",)),
    "exercised": TableShape(
        {"path": TEXT, "added_lines": COUNT, "direct_tests": COUNT, "is_reached": FLAG}, key=("path",)
    ),
    "named": TableShape({"path": TEXT, "named_lines": COUNT}, key=("path",)),
    "altered": TableShape({"path": TEXT, "line": optional(COUNT), "name": TEXT, "what": TEXT}),
    "radius_missing": TableShape({"reason": TEXT}, max_rows=1),
    "sampled": TableShape({"on": TEXT}, max_rows=1),
}
