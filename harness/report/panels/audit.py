"""Audit: what each compiled kernel costs on each architecture, and what was found in it."""

from collections.abc import Sequence

from harness.domain.check import Check, Outcome, Status
from harness.report.findings import finding_view
from harness.report.panels.material import Material, figure_cell, status_cell, table, value
from harness.report.text import label, plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

COLUMNS = (
    "registers", "spill_bytes", "local_accesses", "shared_bytes", "blocks_per_sm", "cluster_blocks",
    "load16_share", "instructions", "main_loop_instructions", "matrix_instructions", "unclassed_accesses",
)  # fmt: skip
"""Figures shown for every kernel; the rest are with the check."""
NEVER_GOOD = ("spill_bytes", "local_accesses", "unclassed_accesses")
WORST_FIRST = (
    Status.FAIL, Status.INVALID, Status.NO_EVIDENCE, Status.INCONCLUSIVE, Status.SKIPPED, Status.PASS,
)  # fmt: skip


def panels(material: Material) -> tuple[Panel, ...]:
    """One row a kernel, its architectures side by side: a figure that is alike on all of them stands once."""
    seen = {f.name for _, o in material.pairs for f in o.figures}
    names = [name for name in COLUMNS if name in seen]
    kernels: dict[str, list[tuple[Check, Outcome]]] = {}
    for check, outcome in material.pairs:
        kernels.setdefault(check.subject or check.op or check.id, []).append((check, outcome))
    rows = tuple(_row(kernel, pairs, names) for kernel, pairs in kernels.items())
    columns = "op | status | architectures" + "".join(f" | #{label(n)}" for n in names) + " | variant"
    findings = tuple(finding_view(f, material.plan) for _, o in material.pairs for f in o.findings)
    return (
        Panel("Findings", "In the compiled code, with the source that it came from.", findings=findings),
        Panel(
            "Compiled kernels",
            "Read from PTX and machine code; no GPU was used. Where architectures differ, figures stand in "
            "their order.",
            table(columns, rows),
        ),
    )


def _row(kernel: str, pairs: Sequence[tuple[Check, Outcome]], names: Sequence[str]) -> tuple[CellView, ...]:
    worst = min(pairs, key=lambda p: WORST_FIRST.index(p[1].status))
    return (
        CellView(plain(worst[0].op or kernel, 60)),
        status_cell(*worst),
        CellView(plain(", ".join(_architecture(check) for check, _ in pairs), 60)),
        *(_figures([outcome for _, outcome in pairs], name) for name in names),
        CellView(plain(kernel, 120), "small"),
    )


def _architecture(check: Check) -> str:
    return check.cell.arch if check.cell is not None else check.id.rpartition("/")[2]


def _figures(outcomes: Sequence[Outcome], name: str) -> CellView:
    cells = [figure_cell(outcome, name) for outcome in outcomes]
    words = list(dict.fromkeys(c.text for c in cells))
    is_bad = name in NEVER_GOOD and any(value(outcome, name) for outcome in outcomes)
    return CellView(
        words[0] if len(words) == 1 else " / ".join(c.text for c in cells), "warn" if is_bad else ""
    )
