"""Kernels: the error of each op against the float64 oracle, beside stock's own and the bound."""

from collections import defaultdict

from harness.domain.check import Check, Outcome, Status
from harness.report.panels.material import Material, cell_name, figure_cell, status_cell, table, value
from harness.report.plots import dumbbell_plot
from harness.report.text import label, plain
from harness.report.view import CellView, Panel

__all__ = ["error_figures", "panels"]

PREFERRED = (
    ("optimised_relative_l2", "stock_relative_l2", "bound_relative_l2"),
    ("relative_l2", "stock_relative_l2", "bound"),
    ("optimised_error", "stock_error", "bound"),
)
MAX_OTHER_COLUMNS = 4
LIMIT_ROWS = 400


def error_figures(outcome: Outcome) -> tuple[float, float, float] | None:
    """(optimised error, stock error, bound) where the outcome has all three."""
    for names in PREFERRED:
        found = [value(outcome, name) for name in names]
        if all(v is not None for v in found):
            return found[0] or 0.0, found[1] or 0.0, found[2] or 0.0
    return None


def panels(material: Material) -> tuple[Panel, ...]:
    """The worst cell of each op as a plot, then ops by cells, then every number."""
    return (_error_plot(material), _status_grid(material), _error_table(material))


def _error_plot(material: Material) -> Panel:
    worst: dict[str, tuple[float, float, float]] = {}
    for check, outcome in material.pairs:
        errors = error_figures(outcome)
        if errors is None or check.op is None or errors[2] <= 0:
            continue
        if check.op not in worst or errors[0] / errors[2] > worst[check.op][0] / worst[check.op][2]:
            worst[check.op] = errors
    rows = [(plain(op, 22), stock, mine, bound) for op, (mine, stock, bound) in sorted(worst.items())]
    svg = None
    if rows:
        svg = dumbbell_plot(rows, "Error of each op in its worst cell", ("stock", "optimised", "bound"))
    return Panel(
        "Error against the float64 oracle, worst cell of each op",
        "Relative L2, logarithmic. The bound follows from stock's own error and the policy.",
        svg=svg,
    )


def _status_grid(material: Material) -> Panel:
    cells = list(dict.fromkeys(cell_name(check) for check, _ in material.pairs))
    ops: dict[str, dict[str, list[tuple[Check, Outcome]]]] = defaultdict(lambda: defaultdict(list))
    for check, outcome in material.pairs:
        ops[check.op or check.subject or check.id][cell_name(check)].append((check, outcome))
    rows = []
    for op, by_cell in ops.items():
        row = [CellView(plain(op, 60))]
        for cell in cells:
            here = by_cell.get(cell, [])
            bad = [pair for pair in here if pair[1].status is not Status.PASS]
            row.append(status_cell(*(bad or here)[0]) if here else CellView("-", "none"))
        rows.append(tuple(row))
    return Panel(
        "Ops by cells",
        "Every cell derives from the claim's envelope; a cell with several checks shows its worst.",
        table("op | " + " | ".join(c or "no cell" for c in cells), rows) if len(cells) <= 14 else None,
    )


def _error_table(material: Material) -> Panel:
    names = list(dict.fromkeys(f.name for _, o in material.pairs for f in o.figures))
    known = [n for n in names if any(n in three for three in PREFERRED)]
    shown = known + [n for n in names if n not in known][:MAX_OTHER_COLUMNS]
    rows = [
        (
            CellView(plain(check.op or check.subject or "", 60)),
            CellView(cell_name(check)),
            status_cell(check, outcome),
            *(figure_cell(outcome, name) for name in shown),
        )
        for check, outcome in material.pairs[:LIMIT_ROWS]
    ]
    columns = "op | cell | status" + "".join(f" | #{label(n)}" for n in shown)
    return Panel("Every op in every cell", "", table(columns, rows))
