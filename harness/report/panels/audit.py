"""Audit: what each compiled kernel costs on each architecture, and what was found in it."""

from harness.domain.check import Outcome
from harness.report.findings import finding_view
from harness.report.panels.material import Material, figure_cell, status_cell, table, value
from harness.report.text import label, plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

COLUMNS = (
    "registers", "spill_bytes", "local_accesses", "shared_bytes", "blocks_per_sm", "instructions",
    "matrix_instructions",
)  # fmt: skip
"""Figures shown for every kernel; the rest are with the check."""


def panels(material: Material) -> tuple[Panel, ...]:
    """One row a kernel and architecture."""
    seen = {f.name for _, o in material.pairs for f in o.figures}
    names = [name for name in COLUMNS if name in seen]
    rows = []
    for check, outcome in material.pairs:
        arch = check.cell.arch if check.cell is not None else check.id.rpartition("/")[2]
        rows.append(
            (
                CellView(plain(check.op or check.subject or check.id, 60)),
                CellView(plain(arch, 20)),
                status_cell(check, outcome),
                *(figure_cell(outcome, name, "warn" if _is_bad(outcome, name) else "") for name in names),
                CellView(plain(check.subject or "", 120), "small"),
            )
        )
    columns = "op | architecture | status" + "".join(f" | #{label(n)}" for n in names) + " | variant"
    findings = tuple(finding_view(f, material.plan) for _, o in material.pairs for f in o.findings)
    return (
        Panel("Findings", "In the compiled code, with the source that it came from.", findings=findings),
        Panel(
            "Compiled kernels",
            "Read from PTX and machine code; no GPU was used.",
            table(columns, rows),
        ),
    )


def _is_bad(outcome: Outcome, name: str) -> bool:
    return name in ("spill_bytes", "local_accesses") and bool(value(outcome, name))
