"""Checks that gave two answers about one thing: same commit, pack, harness, policy and machine.

That an answer differs between commits may be the commits' doing, and is no sign of a flaky check.
"""

from typing import Literal

from scipy.stats import binomtest

from harness.domain.check import StageName
from harness.domain.record import Record
from harness.history.index import Index
from harness.history.series import Selection

__all__ = ["FlakyCheck", "FlakyChecks", "find_flaky"]

MAX_SHOWN = 200


class FlakyCheck(Record):
    """How often repeats of one check agree."""

    check: str
    stage: StageName | None
    repeats: int
    """Runs of which there was more than one about the same thing."""
    pairs: int
    """Pairs of such runs, each run with the next one."""
    disagreeing: int
    share: float
    low: float
    """Lower end of the share's 95 % interval (Wilson), by which checks are ordered."""
    high: float
    statuses: tuple[tuple[str, int], ...]
    """(status, runs), most frequent first."""


class FlakyChecks(Record):
    """Checks whose repeats disagreed, the surest first."""

    schema_version: Literal[1] = 1
    repeated: int
    """Checks that were run more than once about the same thing; without repeats nothing can be flaky."""
    checks: tuple[FlakyCheck, ...]


def find_flaky(index: Index, selection: Selection) -> FlakyChecks:
    """Every check of which two repeats disagreed."""
    values = [selection.check, selection.pack, selection.machine]
    ((repeated,),) = index.rows(f"{_REPEATS} SELECT count(DISTINCT check_id) FROM neighbours", values)
    rows = index.rows(
        f"{_REPEATS} SELECT check_id, count(*), count(*) FILTER (status <> following) AS disagreeing "
        "FROM neighbours GROUP BY check_id HAVING disagreeing > 0",
        values,
    )
    counts: dict[str, list[tuple[str, int]]] = {}
    for check, status, count in index.rows(
        f"{_REPEATS} SELECT check_id, status, count(*) AS runs FROM runs WHERE size > 1 "
        "GROUP BY check_id, status ORDER BY check_id, runs DESC, status",
        values,
    ):
        counts.setdefault(check, []).append((status, count))
    checks = [_flaky(check, pairs, disagreeing, counts[check]) for check, pairs, disagreeing in rows]
    checks.sort(key=lambda c: (-c.low, c.check))
    return FlakyChecks(repeated=repeated, checks=tuple(checks[:MAX_SHOWN]))


_REPEATS = """
WITH runs AS (
    SELECT o.check_id, o.status, b.created_us, b.digest, o.rowid AS place,
           row(b.head, b.pack_digest, b.harness_digest, b.policy_digest, b.machine, b.driver, b.libraries)
               AS thing,
           count(*) OVER (PARTITION BY o.check_id, thing) AS size
    FROM outcome o JOIN bundle b USING (bundle)
    WHERE contains(o.check_id, ?) AND contains(b.pack, ?) AND contains(b.machine, ?)
      AND NOT b.is_dirty AND o.status <> 'SKIPPED'
), neighbours AS (
    SELECT check_id, status, following FROM (
        SELECT check_id, status,
               lead(status) OVER (PARTITION BY check_id, thing ORDER BY created_us, digest, place)
                   AS following
        FROM runs WHERE size > 1
    ) WHERE following IS NOT NULL
)
"""


def _flaky(check: str, pairs: int, disagreeing: int, statuses: list[tuple[str, int]]) -> FlakyCheck:
    interval = binomtest(disagreeing, pairs).proportion_ci(method="wilson")
    stage = check.partition("/")[0]
    return FlakyCheck(
        check=check,
        stage=StageName(stage) if stage in set(StageName) else None,
        repeats=sum(count for _, count in statuses),
        pairs=pairs,
        disagreeing=disagreeing,
        share=disagreeing / pairs,
        low=float(interval.low),
        high=float(interval.high),
        statuses=tuple(statuses),
    )
