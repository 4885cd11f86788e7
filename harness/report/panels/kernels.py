"""Kernels: the error of each op against the float64 oracle, beside stock's own and the bound."""

from collections import defaultdict
from typing import NamedTuple

from harness.domain.check import Check, Outcome, Status
from harness.report.panels.material import Material, cell_name, figure_cell, status_cell, table, value
from harness.report.plots import DumbbellRow, dumbbell_plot
from harness.report.text import label, plain
from harness.report.view import CellView, Panel

__all__ = ["Errors", "errors_of", "panels"]

COLUMNS = (
    "worst_bound_share", "optimised_relative_l2", "stock_relative_l2", "compared_rows", "launches",
    "repeat_identical_share", "shared_operations",
)  # fmt: skip
"""Figures shown for every check; the rest are with the check."""


LIMIT_ROWS = 400


class Errors(NamedTuple):
    """Worst errors of a check, relative L2 against the float64 oracle."""

    optimised: float
    stock: float
    bound_share: float
    """Largest error over what the policy's rule allows there; above 1 fails."""


def errors_of(outcome: Outcome) -> Errors | None:
    """The errors of a check, None where it measured none."""
    found = [value(outcome, n) for n in ("optimised_relative_l2", "stock_relative_l2", "worst_bound_share")]
    return None if any(v is None for v in found) else Errors(*(v or 0.0 for v in found))


def panels(material: Material) -> tuple[Panel, ...]:
    """The worst cell of each op as a plot, then ops by cells, then every number."""
    return (_error_plot(material), _status_grid(material), _error_table(material))


def _error_plot(material: Material) -> Panel:
    worst: dict[str, Errors] = {}
    for check, outcome in material.pairs:
        errors = errors_of(outcome)
        if errors is None or check.op is None:
            continue
        if check.op not in worst or errors.bound_share > worst[check.op].bound_share:
            worst[check.op] = errors
    rows = [
        DumbbellRow(plain(op, 22), e.stock, e.optimised, f"{e.bound_share:.0%}", e.bound_share > 1)
        for op, e in sorted(worst.items())
    ]
    title = "Error of each op in its worst cell"
    return Panel(
        "Error against the float64 oracle, worst cell of each op",
        "Relative L2, logarithmic. On the right, the error over what the policy allows there.",
        svg=dumbbell_plot(rows, title, ("stock", "optimised"), "of bound") if rows else None,
    )


def _place(check: Check, has_models: bool) -> str:
    """Where a check looks: its model where there are several, and its cell."""
    parts = check.id.split("/")
    model = parts[2] if has_models and len(parts) > 3 else ""
    return "guard" if model == "guard" else " ".join(p for p in (model, cell_name(check)) if p)


def _has_models(material: Material) -> bool:
    return len({check.id.split("/")[2] for check, _ in material.pairs if check.id.count("/") > 2}) > 1


def _status_grid(material: Material) -> Panel:
    has_models = _has_models(material)
    places = list(dict.fromkeys(_place(check, has_models) for check, _ in material.pairs))
    ops: dict[str, dict[str, list[tuple[Check, Outcome]]]] = defaultdict(lambda: defaultdict(list))
    for check, outcome in material.pairs:
        ops[check.op or check.subject or check.id][_place(check, has_models)].append((check, outcome))
    rows = []
    for op, by_place in ops.items():
        row = [CellView(plain(op, 60))]
        for place in places:
            here = by_place.get(place, [])
            bad = [pair for pair in here if pair[1].status is not Status.PASS]
            row.append(status_cell(*(bad or here)[0]) if here else CellView("-", "none"))
        rows.append(tuple(row))
    return Panel(
        "Ops by cells",
        "Every cell derives from the claim's envelope; a cell with several checks shows its worst.",
        table("op | " + " | ".join(p or "no cell" for p in places), rows) if len(places) <= 14 else None,
    )


def _error_table(material: Material) -> Panel:
    has_models = _has_models(material)
    seen = {f.name for _, o in material.pairs for f in o.figures}
    shown = [name for name in COLUMNS if name in seen]
    rows = [
        (
            CellView(plain(check.op or check.subject or "", 60)),
            CellView(_place(check, has_models)),
            status_cell(check, outcome),
            *(figure_cell(outcome, name) for name in shown),
        )
        for check, outcome in material.pairs[:LIMIT_ROWS]
    ]
    columns = "op | cell | status" + "".join(f" | #{label(n)}" for n in shown)
    return Panel("Every op in every cell", "", table(columns, rows))
