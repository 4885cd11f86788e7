"""Points over two logarithmic axes as SVG: a roofline, or a Pareto front."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from harness.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, drawing, legend, line, log_ticks, text

__all__ = ["Axes", "Cloud", "Mark", "front", "scatter_plot"]

HEIGHT = 320


@dataclass(frozen=True, slots=True)
class Mark:
    """One point, with what it is."""

    x: float
    y: float
    name: str


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points under one name; joined in their order where they are a front."""

    name: str
    marks: tuple[Mark, ...]
    is_joined: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """What the picture and its axes are called, and a ceiling drawn across."""

    title: str
    x: str
    y: str
    ceiling: float | None = None
    ceiling_name: str = ""


def scatter_plot(clouds: Sequence[Cloud], axes: Axes) -> Markup:
    """All clouds; every coordinate must be above 0."""
    marks = [mark for cloud in clouds for mark in cloud.marks]
    ys = [mark.y for mark in marks] + ([axes.ceiling] if axes.ceiling else [])
    x_ticks = log_ticks(min(m.x for m in marks), max(m.x for m in marks))
    y_ticks = log_ticks(min(ys), max(ys))

    def px(x: float) -> float:
        return LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * _share(x, x_ticks)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(y, y_ticks)

    parts = []
    for tick in y_ticks:
        parts.append(line("grid", LEFT, py(tick), WIDTH - RIGHT, py(tick)))
        parts.append(text("tick end", LEFT - 8, py(tick) + 4, f"{tick:g}"))
    parts += [text("tick mid", px(tick), HEIGHT - BOTTOM + 18, f"{tick:g}") for tick in x_ticks]
    if axes.ceiling:
        parts.append(line("baseline", LEFT, py(axes.ceiling), WIDTH - RIGHT, py(axes.ceiling)))
        parts.append(text("key", LEFT + 6, py(axes.ceiling) - 6, axes.ceiling_name))
    for place, cloud in enumerate(clouds):
        kind = f"s{place % 6}"
        if cloud.is_joined:
            path = " ".join(f"{px(m.x):.1f},{py(m.y):.1f}" for m in cloud.marks)
            parts.append(f'<polyline class="line {kind}" points="{path}"/>')
        parts += [
            f'<circle class="dot {kind}" cx="{px(m.x):.1f}" cy="{py(m.y):.1f}" r="4.5">'
            f"<title>{escape(cloud.name)}, {escape(m.name)}</title></circle>"
            for m in cloud.marks
        ]
    parts.append(text("axis mid", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axes.x))
    parts.append(text("axis", 2, 13, axes.y))
    parts += legend([cloud.name for cloud in clouds])
    return drawing(axes.title, HEIGHT, parts)


def front(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Those that no other beats in both directions, by rising x."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda m: (-m.x, -m.y)):
        if not kept or mark.y > kept[-1].y:
            kept.append(mark)
    return tuple(reversed(kept))


def _share(value: float, ticks: Sequence[float]) -> float:
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])
    return (math.log10(value) - low) / (high - low)
