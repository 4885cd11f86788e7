"""Where metrics moved, and which pull request moved them."""

import json
from typing import Literal

import numpy as np

from harness.domain.record import Record
from harness.history.changepoints import MIN_POINTS, Place, find_places, significant
from harness.history.index import Index
from harness.history.series import Point, Selection, Series, SeriesKey, better, load_series

__all__ = ["Cause", "Move", "Moves", "find_moves"]

MAX_LIBRARIES = 8


class Cause(Record):
    """A bundle that may be the first after a move."""

    bundle: str
    head: str
    pr: int | None
    created_us: int


class Move(Record):
    """One metric's step from one level to another."""

    key: SeriesKey
    kind: Literal["regression", "improvement", "move"]
    """`move` where nobody said which way is better."""
    before: float
    """Median of the level before."""
    after: float
    change: float
    """Relative to the larger of both levels, signed."""
    points_before: int
    points_after: int
    p: float
    """Of this place alone; whether it is reported was decided over all series together."""
    cause: Cause
    """The first bundle after the most likely place."""
    candidates: tuple[Cause, ...]
    """Every bundle that the data cannot tell from it, by time, `cause` included."""
    also_changed: tuple[str, ...]
    """What else differs between the bundle before and the first after: the change may not be to blame."""


class Moves(Record):
    """Every move that stands out, the largest regression first."""

    schema_version: Literal[1] = 1
    series: int
    """Series that were looked at."""
    too_short: int
    """Series with too few points to tell anything."""
    moves: tuple[Move, ...]


def find_moves(index: Index, selection: Selection, min_change: float = 0.02) -> Moves:
    """Moves of at least `min_change` in the selected series; at most 5 % of them are expected to be false."""
    looked_at = too_short = 0
    found: list[tuple[Series, Place]] = []
    quiet = 0
    for series in load_series(index, selection):
        looked_at += 1
        too_short += len(series.points) < MIN_POINTS
        places = find_places(series.values)
        quiet += not places
        found += [(series, place) for place in places]
    kept = significant([place.p for _, place in found] + [1.0] * quiet)
    moves = [_move(series, place) for (series, place), is_kept in zip(found, kept, strict=False) if is_kept]
    moves = [m for m in moves if abs(m.change) >= min_change]
    moves.sort(key=lambda m: (_KINDS.index(m.kind), -abs(m.change), m.key.metric, m.key.check))
    return Moves(series=looked_at, too_short=too_short, moves=tuple(moves))


_KINDS = ("regression", "improvement", "move")


def _move(series: Series, place: Place) -> Move:
    before = float(np.median(series.values[slice(*place.before)]))
    after = float(np.median(series.values[slice(*place.after)]))
    scale = max(abs(before), abs(after)) or 1.0
    way = better(series.key.metric)
    kind: Literal["regression", "improvement", "move"] = "move"
    if way != "neither":
        kind = "improvement" if (after > before) == (way == "higher") else "regression"
    return Move(
        key=series.key,
        kind=kind,
        before=before,
        after=after,
        change=(after - before) / scale,
        points_before=place.before[1] - place.before[0],
        points_after=place.after[1] - place.after[0],
        p=place.p,
        cause=_cause(series.points[place.index]),
        candidates=tuple(_cause(series.points[i]) for i in place.near),
        also_changed=_also_changed(series.points[place.index - 1], series.points[place.index]),
    )


def _cause(point: Point) -> Cause:
    return Cause(bundle=point.digest, head=point.head, pr=point.pr, created_us=point.created_us)


def _also_changed(before: Point, after: Point) -> tuple[str, ...]:
    changed = []
    if before.harness != after.harness:
        changed.append(f"harness {before.harness[:12]} to {after.harness[:12]}")
    if before.policy != after.policy:
        changed.append(f"policy {before.policy[:12]} to {after.policy[:12]}")
    if before.driver != after.driver:
        changed.append(f"driver {before.driver or 'none'} to {after.driver or 'none'}")
    if before.libraries != after.libraries:
        old, new = dict(json.loads(before.libraries)), dict(json.loads(after.libraries))
        names = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
        changed += [f"{n} {old.get(n, 'none')} to {new.get(n, 'none')}" for n in names[:MAX_LIBRARIES]]
        if len(names) > MAX_LIBRARIES:
            changed.append(f"{len(names) - MAX_LIBRARIES} more libraries")
    return tuple(changed)
