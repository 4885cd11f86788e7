"""How often planted controls were noticed, over time: the judge's own pulse.

Every check brings the run that shows it can fail. The catch rate is the share of these runs in which the
check noticed; where it falls, the judge has become blind, whatever it says of the changes.
"""

from typing import Literal

from scipy.stats import binomtest

from harness.domain.record import Record
from harness.history.index import Index
from harness.history.series import Selection

__all__ = ["CatchRate", "CatchRates", "Period", "catch_rates"]

Period = Literal["day", "week", "month"]


class CatchRate(Record):
    """One stage's controls of one kind in one period."""

    start_us: int
    """When the period starts (UTC)."""
    stage: str
    control: str
    runs: int
    noticed: int
    share: float
    low: float
    """95 % interval (Wilson)."""
    high: float


class CatchRates(Record):
    """Catch rates by stage, kind of control and period."""

    schema_version: int = 1
    period: Period
    rates: tuple[CatchRate, ...]


def catch_rates(index: Index, selection: Selection, period: Period = "week") -> CatchRates:
    """Catch rates of every stage and kind of control, by time."""
    rows = index.rows(
        f"SELECT epoch_us(date_trunc('{period}', make_timestamp(b.created_us))) AS start, "
        "split_part(o.check_id, '/', 1) AS stage, o.control, count(*), count(*) FILTER (o.noticed) "
        "FROM outcome o JOIN bundle b USING (bundle) "
        "WHERE o.control IS NOT NULL AND contains(o.check_id, ?) AND contains(b.pack, ?) "
        "AND contains(b.machine, ?) AND NOT b.is_dirty GROUP BY ALL ORDER BY stage, o.control, start",
        [selection.check, selection.pack, selection.machine],
    )
    return CatchRates(period=period, rates=tuple(_rate(*row) for row in rows))


def _rate(start_us: int, stage: str, control: str, runs: int, noticed: int) -> CatchRate:
    interval = binomtest(noticed, runs).proportion_ci(method="wilson")
    return CatchRate(
        start_us=start_us,
        stage=stage,
        control=control,
        runs=runs,
        noticed=noticed,
        share=noticed / runs,
        low=float(interval.low),
        high=float(interval.high),
    )
