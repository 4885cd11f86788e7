"""A heat map as SVG: a value in every field, its colour by how far it is above or below 1."""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from harness.report.svg import RIGHT, WIDTH, drawing, text

__all__ = ["heat_map", "tone_of"]

NAMES, FIELD, HEAD = 270, 30, 46
STEPS = 5
STRONGEST = 3.0
"""Ratio (or its inverse) from which on the colour does not grow."""


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[str, str], float],
    titles: tuple[str, str],
) -> Markup:
    """`values` by (row, column), a field without one stays empty; `titles`: the picture's, the columns'."""
    width = (WIDTH - NAMES - RIGHT) / max(1, len(columns))
    parts = [text("axis", NAMES, 14, titles[1])]
    for nth, column in enumerate(columns):
        parts.append(text("tick mid", NAMES + width * (nth + 0.5), HEAD - 10, column))
    for place, row in enumerate(rows):
        y = HEAD + FIELD * place
        parts.append(text("rowname end", NAMES - 10, y + 19, row))
        for nth, column in enumerate(columns):
            value = values.get((row, column))
            kind = "empty" if value is None else tone_of(value)
            words = "no value" if value is None else f"{value:.2f}"
            x = NAMES + width * nth
            parts.append(
                f'<rect class="field {kind}" x="{x + 1:.1f}" y="{y + 1}" width="{width - 2:.1f}" '
                f'height="{FIELD - 2}" rx="3"><title>{escape(row)}, {escape(column)}: {words}</title></rect>'
            )
            if value is not None:
                parts.append(text("value mid", x + width / 2, y + 19, f"{value:.2f}"))
    return drawing(titles[0], HEAD + FIELD * len(rows) + 8, parts)


def tone_of(value: float) -> str:
    """`gain-1` to `gain-5` above 1, `loss-1` to `loss-5` below, `even` within 2 %."""
    if abs(value - 1) <= 0.02 or value <= 0:
        return "even"
    share = min(1.0, abs(math.log(value)) / math.log(STRONGEST))
    return f"{'gain' if value > 1 else 'loss'}-{max(1, math.ceil(share * STEPS))}"
