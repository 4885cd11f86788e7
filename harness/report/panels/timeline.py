"""One layer of a traced step, kernel by kernel: what ran on which stream, how long, and when nothing did.

Spans are foreign data: rows that do not fit are left out, and an arm has at most `MAX_SPANS`. Times under a
profiler are longer than without one, so the picture shows order, overlap and gaps; the sweep has the speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.domain.check import Check, Outcome
from harness.domain.errors import EvidenceError
from harness.report.panels.material import Material, cell_name, table
from harness.report.plots import Bar, Lane, timeline_plot
from harness.report.text import number, plain
from harness.report.view import CellView, Panel

__all__ = ["timeline_panels"]

MAX_SPANS = 400
MAX_PANELS = 4
MAX_ROWS = 14
ARMS = (("on", "optimised"), ("off", "stock"))


@dataclass(frozen=True, slots=True)
class _Span:
    """One kernel of one arm."""

    name: str
    op: str
    stream: int
    start: float
    end: float


def timeline_panels(material: Material, pairs: Sequence[tuple[Check, Outcome]]) -> tuple[Panel, ...]:
    """A picture and a table for each check whose samples hold a layer of both arms."""
    panels: list[Panel] = []
    for check, _ in pairs:
        arms = {title: _spans(material, check, arm) for arm, title in ARMS}
        if all(arms.values()) and len(panels) < 2 * MAX_PANELS:
            panels += [_picture(check, arms), _counts(check, arms)]
    return tuple(panels)


def _picture(check: Check, arms: dict[str, list[_Span]]) -> Panel:
    ops = list(dict.fromkeys(span.op for spans in arms.values() for span in spans if span.op))
    lanes = [lane for title, spans in arms.items() for lane in _lanes(title, spans, ops)]
    words = "; ".join(f"{title}: {_words(spans)}" for title, spans in arms.items())
    return Panel(
        f"One layer, {_place(check)}",
        f"{words}. Kernels by stream, in microseconds from the layer's start; a lane below another of its "
        "stream holds kernels that overlap. The profiler lengthens every kernel.",
        svg=timeline_plot(lanes, f"time line of one layer, {_place(check)}"),
    )


def _counts(check: Check, arms: dict[str, list[_Span]]) -> Panel:
    rows: list[tuple[CellView, ...]] = []
    for title, spans in arms.items():
        spent: dict[str, list[float]] = {}
        for span in spans:
            spent.setdefault(span.op or span.name, []).append(span.end - span.start)
        longest = sorted(spent, key=lambda name: -sum(spent[name]))
        rows += [_row(title, plain(name, 90), spent[name]) for name in longest[:MAX_ROWS]]
        if rest := longest[MAX_ROWS:]:
            rows.append(_row(title, f"{len(rest)} others", [us for name in rest for us in spent[name]]))
    return Panel(
        f"Kernels of that layer, {_place(check)}",
        "By time. An op of the path has its own name; anything else is named as the trace names it.",
        table("arm | kernel | #launches | #us in all", rows),
    )


def _row(arm: str, name: str, durations: Sequence[float]) -> tuple[CellView, ...]:
    cells = (CellView(arm), CellView(name), CellView(str(len(durations))))
    return (*cells, CellView(number("us", sum(durations))))


def _place(check: Check) -> str:
    kind = dict(check.parameters).get("layer_kind")
    return f"{plain(str(kind), 30)}, {cell_name(check)}" if kind else cell_name(check)


def _words(spans: Sequence[_Span]) -> str:
    """Kernels, the layer's length, and how much of it nothing ran."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    gap = max(0.0, length - _busy(spans))
    return f"{len(spans)} kernels in {length:.0f} us, {gap / length if length else 0.0:.0%} of it gaps"


def _busy(spans: Sequence[_Span]) -> float:
    """Time in which at least one kernel ran."""
    total, until = 0.0, -1.0
    for span in sorted(spans, key=lambda s: s.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _lanes(title: str, spans: Sequence[_Span], ops: Sequence[str]) -> list[Lane]:
    """A lane a stream, and more where kernels of one stream overlap."""
    lanes: list[Lane] = []
    for stream in sorted({span.stream for span in spans}):
        rows: list[list[_Span]] = []
        for span in sorted((s for s in spans if s.stream == stream), key=lambda s: s.start):
            free = next((row for row in rows if row[-1].end <= span.start), None)
            if free is None:
                rows.append([span])
            else:
                free.append(span)
        for nth, row in enumerate(rows[:6]):
            arm = f"{title}, " if not lanes else ""
            lanes.append(
                Lane(f"{arm}stream {stream}" if nth == 0 else "", tuple(_bar(span, ops) for span in row))
            )
    return lanes


def _bar(span: _Span, ops: Sequence[str]) -> Bar:
    kind = ops.index(span.op) % 6 if span.op in ops else None
    return Bar(span.start, span.end, plain(span.op or span.name, 60), kind)


def _spans(material: Material, check: Check, arm: str) -> list[_Span]:
    try:
        samples = material.samples(check.id)
    except EvidenceError:
        return []
    found = None if samples is None else samples.table("spans")
    spans: list[_Span] = []
    for row in () if found is None else found.records():
        start, duration, stream = row.get("start_us"), row.get("duration_us"), row.get("stream")
        is_sound = isinstance(start, int | float) and isinstance(duration, int | float)
        if row.get("arm") != arm or not is_sound or not isinstance(stream, int) or len(spans) >= MAX_SPANS:
            continue
        begin = min(max(0.0, float(start or 0.0)), 1e9)
        end = begin + min(max(0.0, float(duration or 0.0)), 1e9)
        spans.append(_Span(str(row.get("name")), str(row.get("op") or ""), stream, begin, end))
    return spans
