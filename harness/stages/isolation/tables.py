"""The tables of an isolation check."""

from collections.abc import Mapping

from harness.domain.table_shape import COUNT, FLAG, TEXT, TableShape, optional

__all__ = ["SHAPES"]

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
    "sampled": TableShape({"on": TEXT}, max_rows=1),
}
