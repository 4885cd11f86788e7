"""What a stage's panels are made from, and the table cells that all of them use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.domain.check import Check, Figure, Outcome, Samples
from harness.domain.plan import Plan
from harness.report.text import anchor, figure_text, plain
from harness.report.view import CellView, ColumnView, TableView

__all__ = ["Material", "cell_name", "figure", "figure_cell", "status_cell", "table", "value"]


@dataclass(frozen=True, slots=True)
class Material:
    """One stage of a bundle."""

    plan: Plan
    pairs: tuple[tuple[Check, Outcome], ...]
    """Checks with an outcome, in plan order."""
    samples: Callable[[str], Samples | None]
    """Samples of a check, read from the bundle when asked for."""


def figure(outcome: Outcome, name: str) -> Figure | None:
    """A figure by name."""
    return next((f for f in outcome.figures if f.name == name), None)


def value(outcome: Outcome, name: str) -> float | None:
    """A measured figure's value, None where it is missing."""
    found = figure(outcome, name)
    return None if found is None or found.value is None else float(found.value)


def figure_cell(outcome: Outcome, name: str, tone: str = "") -> CellView:
    """A figure as a table cell; a dash where the outcome has none."""
    found = figure(outcome, name)
    return CellView("-" if found is None else plain(figure_text(found), 120), tone)


def status_cell(check: Check, outcome: Outcome) -> CellView:
    """A status that leads to its check."""
    return CellView(outcome.status.value, outcome.status.value, f"#{anchor(check.id)}")


def cell_name(check: Check) -> str:
    """The check's cell in words, only what is not the default: `batch 8, context 512`."""
    cell = check.cell
    if cell is None:
        return ""
    words = [f"batch {cell.batch}", f"context {cell.context}"]
    words += [f"{n} {v}" for n, v in (("tp", cell.tp), ("dcp", cell.dcp)) if v != 1]
    words += [f"{cell.drafts} draft{'' if cell.drafts == 1 else 's'}"] if cell.drafts else []
    words += [cell.kv_dtype] if cell.kv_dtype != "bf16" else []
    words += [cell.phase] if cell.phase != "decode" else []
    return ", ".join(words)


def table(columns: str, rows: Sequence[tuple[CellView, ...]]) -> TableView:
    """A table; column titles are separated by `|`, and one that starts with `#` holds numbers."""
    titles = [title.strip() for title in columns.split("|")]
    return TableView(tuple(ColumnView(t.removeprefix("#"), t.startswith("#")) for t in titles), tuple(rows))
