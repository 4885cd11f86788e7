"""How often planted controls were noticed, over time: the judge's own pulse.

Every check brings the run that shows it can fail. The catch rate is the share of these runs in which the
check noticed; where it falls, the judge has become blind, whatever it says of the changes. Faults that the
fault suite planted count as controls of the kind `fault`, at the stage that is expected to notice them.
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

    schema_version: Literal[1] = 1
    period: Period
    rates: tuple[CatchRate, ...]


def catch_rates(index: Index, selection: Selection, period: Period = "week") -> CatchRates:
    """Catch rates of every stage and kind of control, by time."""
    rows = index.rows(
        f"SELECT epoch_us(date_trunc('{period}', make_timestamp(created_us))) AS start, "
        "stage, control, count(*), count(*) FILTER (noticed) FROM ("
        "SELECT b.created_us, split_part(o.check_id, '/', 1) AS stage, o.control, o.noticed, b.pack, "
        "b.machine, o.check_id AS subject FROM outcome o JOIN bundle b USING (bundle) "
        "WHERE o.control IS NOT NULL AND NOT b.is_dirty UNION ALL "
        "SELECT created_us, stage, 'fault', noticed, pack, machine, stage || '/' || fault FROM fault) "
        "WHERE contains(subject, ?) AND contains(pack, ?) AND contains(machine, ?) "
        "GROUP BY ALL ORDER BY stage, control, start",
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
