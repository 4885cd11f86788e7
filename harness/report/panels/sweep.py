"""Sweep: the gain over stock by batch and context, and where there is none."""

from collections import defaultdict
from collections.abc import Sequence

from harness.domain.cell import Cell
from harness.domain.check import Check, Outcome
from harness.report.panels.material import Material, cell_name, figure, figure_cell, status_cell, table, value
from harness.report.plots import Point, Series, line_plot
from harness.report.text import plain
from harness.report.view import CellView, Panel

__all__ = ["losses", "panels"]


def panels(material: Material) -> tuple[Panel, ...]:
    """A plot for each kind of work, where it loses, and every cell."""
    by_work: dict[str, list[tuple[Check, Outcome]]] = defaultdict(list)
    for check, outcome in material.pairs:
        by_work[_work(check)].append((check, outcome))
    plots = [_ratio_plot(name, pairs) for name, pairs in by_work.items()]
    return (*plots, _loss_panel(material), _cell_table(material))


def _work(check: Check) -> str:
    """What is timed: the sweep, and of whole layers also their kind and layout."""
    parameters = dict(check.parameters)
    words = [check.subject or "sweep", *(str(parameters[n]) for n in ("kind", "layout") if parameters.get(n))]
    return ", ".join(words)


def losses(pairs: tuple[tuple[Check, Outcome], ...]) -> list[tuple[Check, Outcome]]:
    """Cells in which stock is faster, worst first."""
    found = [(check, outcome) for check, outcome in pairs if (value(outcome, "ratio") or 1.0) < 1.0]
    return sorted(found, key=lambda pair: value(pair[1], "ratio") or 1.0)


def _ratio_plot(name: str, pairs: list[tuple[Check, Outcome]]) -> Panel:
    lines: dict[str, list[Point]] = defaultdict(list)
    cells = [check.cell for check, _ in pairs if check.cell is not None]
    for check, outcome in pairs:
        ratio = figure(outcome, "ratio")
        if check.cell is not None and ratio is not None and ratio.value is not None:
            point = Point(check.cell.batch, float(ratio.value), ratio.low, ratio.high)
            lines[_line_name(check.cell, cells)].append(point)
    series = [Series(key, tuple(sorted(points, key=lambda p: p.x))) for key, points in lines.items()]
    svg = None
    if series:
        svg = line_plot(
            series,
            f"Gain over stock, {plain(name, 40)}",
            "batch (requests)",
            "stock time / optimised time",
            1.0,
        )
    return Panel(
        f"Gain over stock: {plain(name, 40)}",
        "Above the dashed line the optimised path is faster. Bars are intervals; both arms run interleaved.",
        svg=svg,
    )


def _line_name(cell: Cell, cells: Sequence[Cell]) -> str:
    """A line's points differ in batch alone: it is named by all else that differs between the cells."""
    names = ("arch", "tp", "dcp", "drafts", "kv_dtype", "phase")
    telling = [name for name in names if len({getattr(one, name) for one in cells}) > 1]
    more = [f"{name.replace('_', ' ')} {getattr(cell, name)}" for name in telling]
    return ", ".join([f"context {cell.context}", *more])


def _loss_panel(material: Material) -> Panel:
    rows = [
        (
            CellView(_cell_words(check)),
            figure_cell(outcome, "ratio", "warn"),
            figure_cell(outcome, "stock_us"),
            figure_cell(outcome, "optimised_us"),
            figure_cell(outcome, "noise_floor"),
            status_cell(check, outcome),
        )
        for check, outcome in losses(material.pairs)
    ]
    return Panel(
        "Where it loses",
        "Cells of the envelope in which stock is faster.",
        table("cell | #ratio | #stock | #optimised | #noise floor | status", rows),
    )


def _cell_table(material: Material) -> Panel:
    rows = [
        (
            CellView(_cell_words(check)),
            status_cell(check, outcome),
            figure_cell(outcome, "verify_steps_per_s"),
            figure_cell(outcome, "tokens_per_s"),
            figure_cell(outcome, "stock_us"),
            figure_cell(outcome, "optimised_us"),
            figure_cell(outcome, "ratio"),
            figure_cell(outcome, "null_ratio"),
            figure_cell(outcome, "path_share"),
        )
        for check, outcome in material.pairs
    ]
    arms = "#stock | #optimised | #ratio | #stock against stock"
    columns = f"cell | status | #verify steps/s | #tokens/s | {arms} | #path share"
    return Panel(
        "Every cell",
        "Verify steps come first: tokens per second also depend on how many drafts are accepted.",
        table(columns, rows),
    )


def _cell_words(check: Check) -> str:
    """The cell, after the kind and layout where whole layers are timed."""
    own = _work(check).partition(", ")[2]
    return ": ".join(filter(None, (plain(own, 60), cell_name(check))))
