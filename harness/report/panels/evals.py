"""Evals: both arms on the same items, whose tokens took which path, and what flipped."""

from harness.report.findings import finding_view
from harness.report.panels.material import Material, figure_cell, status_cell, table
from harness.report.panels.tokens import tokens_by_path
from harness.report.text import label, number, plain
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
    return (
        *tables,
        _path_panel(material),
        Panel("Flipped items", "Right with stock, wrong with the change.", findings=flipped),
    )


def _path_panel(material: Material) -> Panel:
    """A row for each eval, path and reason: an eval is evidence only for the path that its tokens took."""
    rows = []
    for check, _ in material.pairs:
        flows = tokens_by_path(material, check, "optimised")
        total = sum(flow.tokens for flow in flows)
        for flow in flows:
            share = flow.tokens / total
            rows.append(
                (
                    CellView(plain(check.subject or check.id, 60)),
                    CellView(flow.phase),
                    CellView(flow.path),
                    CellView(flow.reason),
                    CellView(f"{flow.tokens:,}"),
                    CellView(number("path_share", share), f"heat-{min(9, int(share * 10))}"),
                )
            )
    return Panel(
        "Tokens by path",
        "Generated tokens of the optimised arm by the path that produced them, and why.",
        table("eval | phase | path | reason | #tokens | #share", rows) if rows else None,
    )
