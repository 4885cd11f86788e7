"""Pictures of a sweep: time over batch, the gain as a heat map, the roofline, and the Pareto front.

Every number in them also stands in the table of all cells. A cell without the figures that a picture needs is
not in it, and a picture without cells is not drawn.
"""

from collections import defaultdict
from collections.abc import Sequence

from harness.domain.cell import Cell
from harness.domain.check import Check, Outcome
from harness.report.heat_map import heat_map
from harness.report.panels.material import figure, value
from harness.report.plots import Point, Series, line_plot
from harness.report.scatter import Axes, Cloud, Mark, front, scatter_plot
from harness.report.text import plain
from harness.report.view import Panel

__all__ = [
    "gain_plot",
    "heat_panel",
    "latency_plot",
    "line_name",
    "pareto_panel",
    "roofline_panel",
    "work_of",
]

Pairs = Sequence[tuple[Check, Outcome]]
ARMS = ("stock", "optimised")
IN_MS = 10_000.0
"""Microseconds from which on a plot counts milliseconds."""


def work_of(check: Check) -> str:
    """What is timed: the sweep, and of whole layers also their kind and layout."""
    parameters = dict(check.parameters)
    words = [check.subject or "sweep", *(str(parameters[n]) for n in ("kind", "layout") if parameters.get(n))]
    return ", ".join(words)


def line_name(cell: Cell, cells: Sequence[Cell]) -> str:
    """A line's points differ in batch alone: it is named by all else that differs between the cells."""
    names = ("arch", "tp", "dcp", "drafts", "kv_dtype", "phase")
    telling = [name for name in names if len({getattr(one, name) for one in cells}) > 1]
    more = [f"{name.replace('_', ' ')} {getattr(cell, name)}" for name in telling]
    return ", ".join([f"context {cell.context}", *more])


def gain_plot(name: str, pairs: Pairs) -> Panel:
    """The ratio over batch with its intervals."""
    lines: dict[str, list[Point]] = defaultdict(list)
    cells = [check.cell for check, _ in pairs if check.cell is not None]
    for check, outcome in pairs:
        ratio = figure(outcome, "ratio")
        if check.cell is not None and ratio is not None and ratio.value is not None:
            point = Point(check.cell.batch, float(ratio.value), ratio.low, ratio.high)
            lines[line_name(check.cell, cells)].append(point)
    title = f"Gain over stock, {plain(name, 40)}"
    svg = (
        line_plot(_series(lines), title, "batch (requests)", "stock time / optimised time", 1.0)
        if lines
        else None
    )
    return Panel(
        f"Gain over stock: {plain(name, 40)}",
        "Above the dashed line the optimised path is faster. Bars are intervals; both arms run interleaved.",
        svg=svg,
    )


def latency_plot(name: str, pairs: Pairs) -> tuple[Panel, ...]:
    """Time over batch of both arms: at the shortest context where there are several."""
    shown = _one_line(pairs)
    most = max((value(o, "stock_us") or 0.0 for _, o in shown), default=0.0)
    scale, unit = (1e3, "milliseconds") if most > IN_MS else (1.0, "microseconds")
    lines: dict[str, list[Point]] = defaultdict(list)
    for check, outcome in shown:
        for arm in ARMS:
            us = value(outcome, f"{arm}_us")
            if check.cell is not None and us is not None:
                lines[arm].append(Point(check.cell.batch, us / scale))
    if not lines or shown[0][0].cell is None:
        return ()
    cells = [check.cell for check, _ in pairs if check.cell is not None]
    where = line_name(shown[0][0].cell, cells)
    title = f"Time over batch: {plain(name, 40)}"
    svg = line_plot(_series(lines), title, "batch (requests)", unit, 0.0)
    return (Panel(title, f"Median of each arm at {where}; other cells are in the table.", svg=svg),)


def heat_panel(pairs: Pairs) -> tuple[Panel, ...]:
    """The gain of every kind of work, by batch."""
    values: dict[tuple[str, str], float] = {}
    rows: list[str] = []
    works = {work_of(check) for check, _ in pairs}
    for check, outcome in pairs:
        ratio = value(outcome, "ratio")
        if check.cell is None or ratio is None:
            continue
        mine = [
            other.cell for other, _ in pairs if other.cell is not None and work_of(other) == work_of(check)
        ]
        where = line_name(check.cell, mine)
        row = plain(f"{_short(work_of(check))}, {where}" if len(works) > 1 else where, 60)
        rows += [row] if row not in rows else []
        values[row, str(check.cell.batch)] = ratio
    if not values:
        return ()
    columns = sorted({column for _, column in values}, key=int)
    title = "Gain over stock by batch"
    note = "Stock time over optimised time: above 1 the optimised path is faster. Empty: not timed."
    return (Panel(title, note, svg=heat_map(rows, columns, values, (title, "batch (requests)"))),)


def roofline_panel(pairs: Pairs) -> tuple[Panel, ...]:
    """Read rate against bytes a layer, under the rate that was measured in the same run."""
    clouds: dict[str, list[Mark]] = defaultdict(list)
    ceilings = []
    for check, outcome in pairs:
        for arm in ARMS:
            moved, us = value(outcome, f"{arm}_moved_bytes"), value(outcome, f"{arm}_us")
            share = value(outcome, f"{arm}_roofline")
            if not moved or not us or not share or check.cell is None:
                continue
            rate = moved / us / 1e3
            ceilings.append(rate / share)
            name = f"{plain(work_of(check), 40)}, batch {check.cell.batch}: {share:.0%}"
            clouds[arm].append(Mark(moved / 1e6, rate, name))
    if not ceilings:
        return ()
    ceiling = max(ceilings)
    axes = Axes(
        "Roofline", "megabytes that the arm must move", "gigabytes a second", ceiling,
        f"read rate measured beside it: {ceiling:,.0f} GB/s",
    )  # fmt: skip
    note = (
        "Bytes of the arm's design over its time. Nothing can be above the dashed line and come from memory."
    )
    shown = [Cloud(arm, tuple(clouds[arm])) for arm in ARMS if clouds[arm]]
    return (Panel("Roofline", note, svg=scatter_plot(shown, axes)),)


def pareto_panel(pairs: Pairs) -> tuple[Panel, ...]:
    """What a user gets against what a device gives, of whole steps."""
    steps = [
        (c, o)
        for c, o in pairs
        if value(o, "verify_steps_per_s") is not None and c.cell is not None and not c.cell.drafts
    ]
    shown = _one_line(steps)
    clouds = []
    for arm in ARMS:
        marks = []
        for check, outcome in shown:
            us = value(outcome, f"{arm}_us")
            if check.cell is not None and us:
                user = 1e6 / us
                batch = check.cell.batch
                marks.append(Mark(user, user * batch / check.cell.tp, f"batch {batch}"))
        if marks:
            clouds.append(Cloud(arm, front(marks), is_joined=True))
    if not clouds or shown[0][0].cell is None:
        return ()
    device = "machine" if shown[0][0].cell.arch == "cpu" else "GPU"
    title = f"Tokens a user against tokens a {device}"
    axes = Axes(title, "tokens a second and user", f"tokens a second and {device}")
    where = line_name(shown[0][0].cell, [c.cell for c, _ in steps if c.cell is not None])
    note = (
        f"The front of each arm over batch, decode alone, without speculation, at {where}. Up and to the "
        "right is better."
    )
    return (Panel(title, note, svg=scatter_plot(clouds, axes)),)


def _series(lines: dict[str, list[Point]]) -> list[Series]:
    return [Series(key, tuple(sorted(points, key=lambda p: p.x))) for key, points in lines.items()]


def _one_line(pairs: Pairs) -> Pairs:
    """Cells that differ in batch alone: those of the line that has most of them, the first among equals."""
    cells = [check.cell for check, _ in pairs if check.cell is not None]
    lines: dict[str, list[tuple[Check, Outcome]]] = defaultdict(list)
    for check, outcome in pairs:
        if check.cell is not None and value(outcome, "stock_us") is not None:
            lines[line_name(check.cell, cells)].append((check, outcome))
    return max(lines.values(), key=len, default=[])


def _short(work: str) -> str:
    """Without the sweep's own name where kind and layout follow."""
    return work.partition(", ")[2] or work
