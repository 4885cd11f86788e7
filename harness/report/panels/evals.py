"""Evals: both arms on the same items, with what flipped."""

from harness.report.findings import finding_view
from harness.report.panels.material import Material, figure_cell, status_cell, table
from harness.report.text import label, plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

MAX_COLUMNS = 7


def panels(material: Material) -> tuple[Panel, ...]:
    """One table for each set of figures, as drift and tasks measure different things; then flipped items."""
    groups: dict[tuple[str, ...], list[tuple[CellView, ...]]] = {}
    for check, outcome in material.pairs:
        if not outcome.figures:
            continue
        names = tuple(f.name for f in outcome.figures)[:MAX_COLUMNS]
        groups.setdefault(names, []).append(
            (
                CellView(plain(check.subject or check.id, 60)),
                status_cell(check, outcome),
                *(figure_cell(outcome, name) for name in names),
            )
        )
    tables = [
        Panel(
            "Stock against optimised, paired" if "score_difference" in names else "Along a text",
            "The same items, seeds and decoding in both arms; the interval is of the paired difference."
            if "score_difference" in names
            else "Teacher-forced log-probabilities against the float64 oracle.",
            table("eval | status" + "".join(f" | #{label(n)}" for n in names), rows),
        )
        for names, rows in groups.items()
    ]
    flipped = tuple(finding_view(f, material.plan) for _, o in material.pairs for f in o.findings)
    return (*tables, Panel("Flipped items", "Right with stock, wrong with the change.", findings=flipped))
