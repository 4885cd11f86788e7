"""Answers as one SVG file that loads nothing: panels of points over time, or rows of shares.

Colours follow the reader's theme. Every text went through `plain` and is escaped, as names of machines and
checks come out of bundles that somebody else wrote.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import escape

from harness.history.catches import CatchRates
from harness.history.flaky import FlakyChecks
from harness.history.moves import Move, Moves
from harness.history.series import SeriesKey, Trend
from harness.report.text import compact, plain

__all__ = ["MAX_PANELS", "draw_catches", "draw_flaky", "draw_moves", "draw_trends"]

MAX_PANELS = 24
"""Panels or, four times as many, rows; the tables have all."""
WIDTH, HEIGHT = 760, 190
LEFT, RIGHT, TOP, BOTTOM = 74, 18, 34, 26
ROW = 22
_STYLE = """
svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#333}.t{font-weight:600}.k{fill:#666}
.g{stroke:#ddd}.d{fill:#2463a8}.w{stroke:#2463a8;opacity:.35}.m{stroke:#b3261e;stroke-dasharray:4 3}
.l{stroke:#2463a8;opacity:.5;fill:none}.mt{fill:#b3261e}
@media(prefers-color-scheme:dark){svg{background:#14171a}text{fill:#ddd}.k{fill:#9aa}.g{stroke:#333}
.d{fill:#7ab5f0}.w,.l{stroke:#7ab5f0}.m{stroke:#ff8a80}.mt{fill:#ff8a80}}
"""


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    points: tuple[tuple[int, float, float | None, float | None], ...]
    """(microseconds, value, low, high), by rising time."""
    marks: tuple[tuple[int, str], ...] = ()
    is_share: bool = False


def draw_trends(found: Sequence[Trend]) -> str:
    """A panel for each series."""
    return _panels([_Panel(_name(t.key), _points(t)) for t in found], "Trends")


def draw_moves(found: Moves, trends: Sequence[Trend]) -> str:
    """A panel for each series that moved, with its moves marked."""
    of_key: dict[SeriesKey, list[Move]] = {}
    for move in found.moves:
        of_key.setdefault(move.key, []).append(move)
    by_key = {t.key: t for t in trends}
    panels = [
        _Panel(_name(key), _points(by_key[key]), tuple((m.cause.created_us, _mark(m)) for m in moves))
        for key, moves in of_key.items()
        if key in by_key
    ]
    return _panels(panels, "Moves")


def draw_catches(found: CatchRates) -> str:
    """A panel for each stage and kind of control."""
    groups: dict[str, list[tuple[int, float, float | None, float | None]]] = {}
    for rate in found.rates:
        groups.setdefault(f"{rate.stage}, {rate.control}", []).append(
            (rate.start_us, rate.share, rate.low, rate.high)
        )
    panels = [_Panel(f"{name}: controls noticed", tuple(p), is_share=True) for name, p in groups.items()]
    return _panels(panels, "Catch rate")


def draw_flaky(found: FlakyChecks) -> str:
    """A row for each check: the share of its repeats that disagreed, with its interval."""
    rows = found.checks[: 4 * MAX_PANELS]
    left = 430
    parts = []
    for place, check in enumerate(rows):
        y = TOP + ROW * place + ROW / 2
        x, low, high = (left + (WIDTH - left - RIGHT) * v for v in (check.share, check.low, check.high))
        parts += [
            _text("", left - 10, y + 4, check.check[-62:], "end"),
            f'<line class="w" x1="{low:.1f}" y1="{y:.1f}" x2="{high:.1f}" y2="{y:.1f}" stroke-width="4"/>',
            f'<circle class="d" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        ]
    height = TOP + ROW * max(1, len(rows)) + BOTTOM
    for share in (0.0, 0.5, 1.0):
        x = left + (WIDTH - left - RIGHT) * share
        parts.append(f'<line class="g" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}"/>')
        parts.append(_text("k", x, height - 8, f"{share:.0%}", "middle"))
    if not rows:
        parts.append(_text("k", 12, TOP + 16, "no check gave two answers about one thing"))
    parts.append(_text("t", 12, 20, "Repeats that disagreed"))
    return _svg("Flaky checks", height, parts)


def _points(trend: Trend) -> tuple[tuple[int, float, float | None, float | None], ...]:
    return tuple((p.created_us, p.value, p.low, p.high) for p in trend.points)


def _name(key: SeriesKey) -> str:
    return f"{key.metric} · {key.check} · {key.machine}"


def _mark(move: Move) -> str:
    what = move.cause.head[:10] if move.cause.pr is None else f"#{move.cause.pr}"
    return f"{what} {move.change:+.1%}"


def _panels(panels: Sequence[_Panel], title: str) -> str:
    shown = panels[:MAX_PANELS]
    parts = []
    for place, panel in enumerate(shown):
        parts.append(f'<g transform="translate(0 {place * HEIGHT})">{"".join(_panel(panel))}</g>')
    height = HEIGHT * max(1, len(shown))
    if len(panels) > MAX_PANELS:
        parts.append(_text("k", 12, height + 14, f"and {len(panels) - MAX_PANELS} more in the table"))
        height += 24
    if not shown:
        parts.append(_text("k", 12, 40, "nothing to show"))
    return _svg(title, height, parts)


def _panel(panel: _Panel) -> list[str]:
    values = [v for _, *point in panel.points for v in point if v is not None]
    bottom, top = (0.0, 1.0) if panel.is_share else _range(min(values), max(values))
    times = [p[0] for p in panel.points]
    span = (times[-1] - times[0]) or 1

    def px(time: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((time - times[0]) / span if len(times) > 1 else 0.5)

    def py(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - bottom) / (top - bottom)

    parts = [_text("t", 12, 18, panel.title[:104])]
    for share in (0.0, 0.5, 1.0):
        value = bottom + (top - bottom) * share
        label = f"{value:.0%}" if panel.is_share else compact(value)
        parts.append(
            f'<line class="g" x1="{LEFT}" y1="{py(value):.1f}" x2="{WIDTH - RIGHT}" y2="{py(value):.1f}"/>'
        )
        parts.append(_text("k", LEFT - 8, py(value) + 4, label, "end"))
    parts.append(_text("k", px(times[0]), HEIGHT - 8, _date(times[0])))
    if len(times) > 1:
        parts.append(_text("k", px(times[-1]), HEIGHT - 8, _date(times[-1]), "end"))
    for time, _, low, high in panel.points:
        if low is not None and high is not None:
            parts.append(_whisker(px(time), py(low), py(high)))
    path = " ".join(f"{px(t):.1f},{py(v):.1f}" for t, v, *_ in panel.points)
    parts.append(f'<polyline class="l" points="{path}"/>')
    parts += [f'<circle class="d" cx="{px(t):.1f}" cy="{py(v):.1f}" r="2.5"/>' for t, v, *_ in panel.points]
    for time, text in panel.marks:
        x = px(time)
        is_right = x > WIDTH * 0.75
        parts.append(f'<line class="m" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text("mt", x + (-5 if is_right else 5), TOP, text, "end" if is_right else "start"))
    return parts


def _range(low: float, high: float) -> tuple[float, float]:
    """A little more than the values take."""
    spread = (high - low) or abs(high) or 1.0
    return low - 0.08 * spread, high + 0.08 * spread


def _whisker(x: float, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f'<line class="w" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'


def _date(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d")


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(plain(text, 160))}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )
