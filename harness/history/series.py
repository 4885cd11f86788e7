"""One metric of one check over time, under one set of conditions."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from harness.domain.errors import InputError
from harness.domain.record import Record
from harness.history.index import Index

__all__ = [
    "MAX_LAST", "Better", "Point", "Selection", "Series", "SeriesKey", "Trend", "better", "load_series",
    "require_metrics", "trends",
]  # fmt: skip

Better = Literal["higher", "lower", "neither"]
MAX_LAST = 1000
"""Newest points of a series; the statistics take seconds for more."""
HIGHER = ("ratio", "_per_s", "score_difference", "optimised_score", "path_share", "agreement")
LOWER = (
    "_us", "_ms", "_ns", "_bytes", "optimised_relative_l2", "bound_share", "kl", "kl_to_stock", "registers",
    "unclassed_accesses", "local_accesses",
)  # fmt: skip
NEITHER = ("null_ratio", "stock_us", "poison_kl", "switching_kl", "shared_bytes")
"""Figures of stock and of controls, which end like others."""
_COUNTED = "('PASS', 'FAIL', 'INCONCLUSIVE')"


class SeriesKey(Record):
    """What all points of a series share."""

    pack: str
    check: str
    metric: str
    machine: str


class Point(NamedTuple):
    """One measurement and the bundle it is from."""

    value: float
    low: float | None
    high: float | None
    status: str
    created_us: int
    digest: str
    head: str
    pr: int | None
    harness: str
    policy: str
    driver: str
    libraries: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points by rising time."""

    key: SeriesKey
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """The numbers alone."""
        return [p.value for p in self.points]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which series a question is about."""

    metrics: tuple[str, ...] = ()
    """Empty: every metric of which it is known which way is better."""
    check: str = ""
    """Text that the check's id holds, such as a cell or an op."""
    pack: str = ""
    machine: str = ""
    """Text that the machine's name holds."""
    last: int = 300
    """Newest points of each series."""


class TrendPoint(Record):
    """A point as it is printed."""

    created_us: int
    value: float
    low: float | None
    high: float | None
    status: str
    bundle: str
    head: str
    pr: int | None


class Trend(Record):
    """One series and how far it went."""

    key: SeriesKey
    better: Better
    points: tuple[TrendPoint, ...]
    median_first: float
    """Of the first fifth of the points, at least one."""
    median_last: float
    change: float | None
    """From the first fifth to the last, relative; None where it starts at zero."""


def better(metric: str) -> Better:
    """Which way a metric is better, by its name."""
    if metric in NEITHER or metric.startswith(("stock_", "smallest_", "poison", "null_")):
        return "neither"
    if metric.endswith(HIGHER):
        return "higher"
    return "lower" if metric.endswith(LOWER) else "neither"


def require_metrics(index: Index, selection: Selection) -> tuple[str, ...]:
    """The metrics asked for; raises `InputError` that names those there are for one that no bundle has."""
    known = [m for (m,) in index.rows("SELECT DISTINCT metric FROM figure ORDER BY metric")]
    unknown = [m for m in selection.metrics if m not in known]
    if unknown:
        shown = ", ".join(known[:40]) + (", ..." if len(known) > 40 else "")
        raise InputError(
            f"no bundle has a metric {unknown[0][:80]!r}; there are {shown or 'none: no bundle was found'}"
        )
    return selection.metrics or tuple(m for m in known if better(m) != "neither")


def load_series(index: Index, selection: Selection) -> Iterator[Series]:
    """Series by metric, check and machine, one metric at a time; raises `InputError`."""
    if not 1 <= selection.last <= MAX_LAST:
        raise InputError(f"--last {selection.last} is out of range; give 1 to {MAX_LAST} points")
    for metric in require_metrics(index, selection):
        rows = index.rows(
            _QUERY, [metric, selection.check, selection.pack, selection.machine, selection.last]
        )
        for (pack, check, machine), group in groupby(rows, key=lambda row: row[:3]):
            key = SeriesKey(pack=pack, check=check, metric=metric, machine=machine)
            yield Series(key, tuple(Point(*row[3:]) for row in group))


def trends(index: Index, selection: Selection) -> tuple[Trend, ...]:
    """Each selected series with how far it went."""
    return tuple(_trend(series) for series in load_series(index, selection))


# A check can repeat a figure's name only by a fault; then the figure that was written first counts.
_QUERY = f"""
SELECT pack, check_id, machine, value, low, high, status, created_us, digest, head, pr, harness_digest,
       policy_digest, driver, libraries
FROM (
    SELECT b.*, f.check_id, f.value, f.low, f.high, o.status,
           row_number() OVER (PARTITION BY b.bundle, f.check_id ORDER BY f.rowid) AS copy,
           row_number() OVER (
               PARTITION BY b.pack, f.check_id, b.machine ORDER BY b.created_us DESC, b.digest DESC
           ) AS age
    FROM figure f JOIN bundle b USING (bundle)
    JOIN outcome o ON o.bundle = f.bundle AND o.check_id = f.check_id
    WHERE f.metric = ? AND contains(f.check_id, ?) AND contains(b.pack, ?) AND contains(b.machine, ?)
      AND NOT b.is_dirty AND o.status IN {_COUNTED}
)
WHERE copy = 1 AND age <= ?
ORDER BY pack, check_id, machine, created_us, digest
"""


def _trend(series: Series) -> Trend:
    values = series.values
    part = max(1, len(values) // 5)
    first, last = _median(values[:part]), _median(values[-part:])
    return Trend(
        key=series.key,
        better=better(series.key.metric),
        points=tuple(
            TrendPoint(
                created_us=p.created_us, value=p.value, low=p.low, high=p.high, status=p.status,
                bundle=p.digest, head=p.head, pr=p.pr,
            )
            for p in series.points
        ),
        median_first=first,
        median_last=last,
        change=None if first == 0 else (last - first) / abs(first),
    )  # fmt: skip


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
