"""What every plot is drawn from: lines, words, a legend, a round axis. Classes alone give colours."""

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

__all__ = [
    "BOTTOM", "LEFT", "RIGHT", "TOP", "WIDTH", "axis", "drawing", "legend", "line", "log_ticks", "text",
]  # fmt: skip

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 44
LETTER, BESIDE = 7.0, 180.0
"""Width of a letter of a key, and of an axis's title, about."""


def drawing(title: str, height: float, parts: Sequence[str]) -> Markup:
    """The whole picture, with its name for screen readers."""
    return Markup(
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def legend(names: Sequence[str], first: int = 0, right: int = RIGHT) -> list[str]:
    """Names with their dots, set to the right; colours from `first` down where it is 1, else upwards. Below
    the title of the y axis where they would run into it.
    """
    widths = [LETTER * len(name) + 22 for name in names]
    x, y = float(WIDTH - right), 14 if sum(widths) < WIDTH - right - BESIDE else 28
    parts = []
    for place in range(len(names) - 1, -1, -1):
        x -= widths[place]
        kind = first - place if first else place % 6
        parts.append(f'<circle class="dot s{kind}" cx="{x + 4:.1f}" cy="{y - 4}" r="5"/>')
        parts.append(text("key", x + 14, y, names[place]))
    return parts


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line; `kind` is its class."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(kind: str, x: float, y: float, words: str) -> str:
    """Words, escaped; `kind` is their class."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def axis(low: float, high: float) -> tuple[float, float, float]:
    """A round range around the values, and the step between its ticks."""
    spread = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(spread / 3))
    step = next(step * f for f in (1, 2, 5, 10) if spread / (step * f) <= 5)
    return math.floor(low / step) * step, math.ceil(high / step + 1e-9) * step, step


def log_ticks(low: float, high: float) -> list[float]:
    """Round values of a logarithmic axis, from at or below `low` to at or above `high`: 1, 2 and 5 of each
    power of ten.
    """
    steps = [f * 10.0**power for power in range(math.floor(math.log10(low)), 40) for f in (1, 2, 5)]
    first = max((n for n, value in enumerate(steps) if value <= low * (1 + 1e-9)), default=0)
    last = next(n for n, value in enumerate(steps) if value >= high * (1 - 1e-9))
    return steps[first : max(last, first + 1) + 1]
