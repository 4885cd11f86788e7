"""The opt-in of a pack as a drawing: selection, state, guard, return from left to right, declines below."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from markupsafe import Markup, escape

__all__ = ["Step", "draw_steps"]

WIDTH: Final = 720
COLUMNS: Final = (("selection", "default"), ("carrier", "state"), ("guard",), ("return",))
MAX_ROWS: Final = 6
BOX: Final = 158
ROW: Final = 46
TOP: Final = 30


class Step(NamedTuple):
    """One place of the graph."""

    role: str
    where: str
    """`path:line`."""
    text: str
    leads_to: tuple[str, ...]


class _Box(NamedTuple):
    x: float
    y: float
    step: Step


def draw_steps(steps: Sequence[Step], title: str) -> Markup:
    """SVG text; colours are classes of the page. What does not fit is counted in words below."""
    boxes, hidden = _placed(steps)
    declines = [step for step in steps if step.role == "decline"]
    rows = max((round((box.y - TOP) / ROW) for box in boxes), default=0) + 1
    height = TOP + ROW * rows + (44 if declines or hidden else 12)
    parts = [
        _text("axis", 4 + 180 * n, 16, name)
        for n, name in enumerate(("selection", "state", "guard", "return"))
    ]
    by_place = {box.step.where: box for box in reversed(boxes)}
    parts += [
        _arrow(box, other)
        for box in boxes
        for target in box.step.leads_to
        if (other := by_place.get(target)) is not None and other.x > box.x
    ]
    parts += [_drawn(box) for box in boxes]
    if declines:
        targets = sorted({t.rpartition("/")[2] for step in declines for t in step.leads_to})
        words = f"{len(declines)} declines lead to {', '.join(targets[:3])}" + (
            " and more" if len(targets) > 3 else ""
        )
        parts.append(_text("tick", 4, height - 24, words))
    if hidden:
        parts.append(_text("tick", 4, height - 8, f"{hidden} more places are in the table"))
    return Markup(
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _placed(steps: Sequence[Step]) -> tuple[list[_Box], int]:
    boxes: list[_Box] = []
    hidden = 0
    for column, roles in enumerate(COLUMNS):
        own = [step for step in steps if step.role in roles]
        hidden += max(0, len(own) - MAX_ROWS)
        boxes += [_Box(4 + 180 * column, TOP + ROW * row, step) for row, step in enumerate(own[:MAX_ROWS])]
    return boxes, hidden


def _drawn(box: _Box) -> str:
    name = _short(box.step.where.rpartition("/")[2], 27)
    text = _short(("default " if box.step.role == "default" else "") + box.step.text, 27)
    return (
        f"<g><title>{escape(box.step.role)} {escape(box.step.where)}</title>"
        f'<rect class="line grid" x="{box.x:.0f}" y="{box.y:.0f}" width="{BOX}" height="34" rx="4"/>'
        f"{_text('key', box.x + 6, box.y + 14, name)}{_text('tick', box.x + 6, box.y + 28, text)}</g>"
    )


def _arrow(one: _Box, other: _Box) -> str:
    x1, y1, x2, y2 = one.x + BOX, one.y + 17, other.x, other.y + 17
    return (
        f'<path class="line join" d="M{x1:.0f} {y1:.0f} C{x1 + 14:.0f} {y1:.0f} '
        f'{x2 - 14:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"/>'
        f'<circle class="dot s0" cx="{x2:.0f}" cy="{y2:.0f}" r="3"/>'
    )


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "\u2026"
