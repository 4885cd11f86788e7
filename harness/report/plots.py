"""Plots as SVG text. Colours are CSS classes of the page, so that they follow light, dark and print.

Drawn by hand and not by a plotting library, since a library's SVG brings inline styles, which the page's
content policy forbids, and colours that do not follow the reader's theme. Every plot has a title for screen
readers; the numbers themselves are always in a table beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from harness.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, axis, drawing, legend, line, text

__all__ = [
    "Bar", "DumbbellRow", "Lane", "Point", "Series", "dumbbell_plot", "line_plot", "status_bar",
    "timeline_plot",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One point with its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points under one name, by rising x."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class DumbbellRow:
    """One row of a dumbbell plot."""

    name: str
    first: float
    second: float
    note: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted, on a time line; `kind` chooses a colour, None is grey."""

    start: float
    end: float
    name: str
    kind: int | None


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars that do not overlap, under one name."""

    name: str
    bars: tuple[Bar, ...]


def status_bar(counts: Sequence[tuple[str, int]], title: str, total: int = 0) -> Markup:
    """A thin bar split by status; where `total` is more than the counts, its end stays empty."""
    total = max(total, sum(count for _, count in counts))
    parts, x = [], 0.0
    for status, count in counts:
        width = 100 * count / total if total else 0
        parts.append(
            f'<rect class="fill-{escape(status)}" x="{x:.2f}" y="0" width="{max(0.0, width - 0.6):.2f}" '
            'height="10" rx="1.5"/>'
        )
        x += width
    return Markup(
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def line_plot(
    series: Sequence[Series], title: str, x_title: str, y_title: str, baseline: float | None = None
) -> Markup:
    """Lines over a logarithmic x axis (powers of two), with intervals; `baseline` is drawn across."""
    points = [p for s in series for p in s.points]
    height = 300
    xs = sorted({p.x for p in points})
    values = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    if baseline is not None:
        values.append(baseline)
    bottom, top, step = axis(min(values), max(values))

    def px(x: float) -> float:
        spread = math.log2(xs[-1]) - math.log2(xs[0]) or 1.0
        return LEFT + 14 + (WIDTH - LEFT - RIGHT - 28) * (math.log2(x) - math.log2(xs[0])) / spread

    def py(y: float) -> float:
        return height - BOTTOM - (height - TOP - BOTTOM) * (y - bottom) / (top - bottom)

    parts = []
    tick = bottom
    while tick <= top + step / 2:
        parts.append(line("grid", LEFT, py(tick), WIDTH - RIGHT, py(tick)))
        parts.append(text("tick end", LEFT - 8, py(tick) + 4, f"{tick:.3g}"))
        tick += step
    parts += [text("tick mid", px(x), height - BOTTOM + 18, f"{x:g}") for x in xs]
    if baseline is not None:
        parts.append(line("baseline", LEFT, py(baseline), WIDTH - RIGHT, py(baseline)))
    for place, one in enumerate(series):
        kind = f"s{place % 6}"
        path = " ".join(f"{px(p.x):.1f},{py(p.y):.1f}" for p in one.points)
        parts.append(f'<polyline class="line {kind}" points="{path}"/>')
        for p in one.points:
            if p.low is not None and p.high is not None:
                parts.append(line(f"whisker {kind}", px(p.x), py(p.low), px(p.x), py(p.high)))
            parts.append(f'<circle class="dot {kind}" cx="{px(p.x):.1f}" cy="{py(p.y):.1f}" r="4"/>')
    parts.append(text("axis mid", (LEFT + WIDTH - RIGHT) / 2, height - 6, x_title))
    parts.append(text("axis", 2, 13, y_title))
    parts += legend([s.name for s in series])
    return drawing(title, height, parts)


def dumbbell_plot(rows: Sequence[DumbbellRow], title: str, names: tuple[str, str], note_title: str) -> Markup:
    """For each row two values on one logarithmic axis, joined by a line, and a note at its end."""
    row_height, left, right = 30, 150, 84
    height = TOP + row_height * len(rows) + 34
    values = [v for row in rows for v in (row.first, row.second) if v > 0] or [1.0]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))

    def px(value: float) -> float:
        position = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return left + (WIDTH - left - right) * position

    parts = []
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    for tick in [f * 10.0**power for power in range(low, high) for f in factors] + [10.0**high]:
        parts.append(line("grid", px(tick), TOP - 4, px(tick), height - 30))
        parts.append(text("tick mid", px(tick), height - 12, f"{tick:.0e}".replace("e-0", "e-")))
    for place, row in enumerate(rows):
        y = TOP + row_height * place + row_height / 2
        over = " over" if row.is_over else ""
        parts.append(text("rowname end", left - 12, y + 4, row.name))
        parts.append(line("join", px(row.first), y, px(row.second), y))
        parts.append(f'<circle class="dot s1" cx="{px(row.first):.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(f'<circle class="dot s0{over}" cx="{px(row.second):.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(text(f"rowname end{over}", WIDTH - 4, y + 4, row.note))
    parts.append(text("axis end", WIDTH - 4, TOP - 6, note_title))
    parts += legend(names, first=1, right=right + 60)
    return drawing(title, height, parts)


def timeline_plot(lanes: Sequence[Lane], title: str) -> Markup:
    """Bars on lanes over one linear axis of microseconds; a bar wide enough carries its name."""
    left, lane_height = 130, 22
    height = TOP + lane_height * len(lanes) + 30
    longest = max((bar.end for lane in lanes for bar in lane.bars), default=1.0) or 1.0
    step = axis(0.0, longest)[2]

    def px(value: float) -> float:
        return left + (WIDTH - left - RIGHT) * value / longest

    parts = []
    for nth in range(int(longest / step) + 1):
        parts.append(line("grid", px(nth * step), TOP - 4, px(nth * step), height - 26))
        parts.append(text("tick mid", px(nth * step), height - 10, f"{nth * step:g}"))
    for place, lane in enumerate(lanes):
        y = TOP + lane_height * place
        parts.append(text("rowname end", left - 8, y + 15, lane.name))
        for bar in lane.bars:
            x, width = px(bar.start), max(0.8, px(bar.end) - px(bar.start))
            kind = "none" if bar.kind is None else f"s{bar.kind}"
            parts.append(
                f'<rect class="dot span {kind}" x="{x:.1f}" y="{y + 3:.1f}" width="{width:.1f}" height="16">'
                f"<title>{escape(bar.name)}: {bar.start:.1f} to {bar.end:.1f} us</title></rect>"
            )
            if width > 7 * len(bar.name):
                parts.append(text("key", x + 3, y + 15, bar.name))
    parts.append(text("axis end", WIDTH - 4, TOP - 10, "microseconds"))
    return drawing(title, height, parts)
