"""Sweep: the gain over stock by batch and context, and where there is none."""

from collections import defaultdict

from harness.domain.check import Check, Outcome
from harness.measure.levels import reconciled
from harness.report.panels.material import Material, cell_name, figure_cell, status_cell, table, value
from harness.report.panels.sweep_plots import (
    gain_plot,
    heat_panel,
    latency_plot,
    pareto_panel,
    roofline_panel,
    work_of,
)
from harness.report.text import anchor, plain
from harness.report.view import CellView, Panel

__all__ = ["losses", "panels"]

MAX_WORKS = 8
"""Kinds of work with plots of their own; a sweep of single ops has more, all of them in the heat map."""


def panels(material: Material) -> tuple[Panel, ...]:
    """All cells at a glance, plots for each kind of work, where it loses, what explains what, and every
    cell.
    """
    by_work: dict[str, list[tuple[Check, Outcome]]] = defaultdict(list)
    for check, outcome in material.pairs:
        by_work[work_of(check)].append((check, outcome))
    plots = [
        panel
        for name, pairs in list(by_work.items())[:MAX_WORKS]
        for panel in (gain_plot(name, pairs), *latency_plot(name, pairs))
    ]
    return (
        *heat_panel(material.pairs), *plots, *pareto_panel(material.pairs), *roofline_panel(material.pairs),
        _loss_panel(material), *_level_panel(material), _cell_table(material),
    )  # fmt: skip


def losses(pairs: tuple[tuple[Check, Outcome], ...]) -> list[tuple[Check, Outcome]]:
    """Cells in which stock is faster, worst first."""
    found = [(check, outcome) for check, outcome in pairs if (value(outcome, "ratio") or 1.0) < 1.0]
    return sorted(found, key=lambda pair: value(pair[1], "ratio") or 1.0)


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


def _level_panel(material: Material) -> tuple[Panel, ...]:
    """Wholes beside the sum of their parts; nothing where no cell names parts that were timed."""
    levels = [level for level in reconciled(material.pairs) if any(p.saved for p in level.parts)]
    rows = [
        (
            CellView(_cell_words(level.check), link=f"#{anchor(level.check.id)}"),
            CellView(f"{level.saved.us:.1f} us"),
            CellView(f"{level.explained.us:.1f} us"),
            CellView(f"{level.gap.us:+.1f} us [{level.gap.low:+.1f}, {level.gap.high:+.1f}]"),
            CellView(plain(level.words(), 200), "" if level.is_explained else "warn"),
        )
        for level in levels
    ]
    if not rows:
        return ()
    note = (
        "Time saved in a whole layer or step beside the sum of what its parts save alone, each from memory. "
        "A gap is time between kernels, work that overlaps, or a part nobody timed."
    )
    columns = "whole | #saved | #parts together | #gap | what that says"
    return (Panel("What explains the gain", note, table(columns, rows)),)


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
    own = work_of(check).partition(", ")[2]
    return ": ".join(filter(None, (plain(own, 60), cell_name(check))))
