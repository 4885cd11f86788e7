"""The index: a DuckDB file that is brought up to date with a folder of bundles, reading only what is new.

Invariant: a bundle counts once, by its manifest's digest, however many copies of it lie about. Each batch is
one transaction, so that an interrupted run goes on where it stopped. The file can be deleted at any time.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from harness.domain.errors import DeviceMissing, InputError
from harness.domain.record import Record
from harness.history.reading import BUNDLE_COLUMNS, FAULT_COLUMNS, Batch, read_batch
from harness.history.scan import Source, find_bundles

__all__ = ["Index", "Refreshed", "RefusedBundle", "open_index"]

INDEX_VERSION = 1
BATCH = 250
ALONE = 2000
"""Up to so many new bundles are read by this process alone; starting others would take longer."""
SHOWN = 20
SUFFIX = ".duckdb"
_TABLES = f"""
CREATE TABLE fasttrack_history (version INTEGER);
INSERT INTO fasttrack_history VALUES ({INDEX_VERSION});
CREATE TABLE source (path VARCHAR, signature VARCHAR, bundle INTEGER, refused VARCHAR, score VARCHAR);
CREATE TABLE fault (
    digest VARCHAR, created_us BIGINT, pack VARCHAR, machine VARCHAR, tier VARCHAR, stage VARCHAR,
    fault VARCHAR, noticed BOOLEAN
);
CREATE TABLE bundle (
    bundle INTEGER, digest VARCHAR, created_us BIGINT, repository VARCHAR, pr BIGINT, base VARCHAR,
    head VARCHAR, is_dirty BOOLEAN, tier VARCHAR, pack VARCHAR, pack_digest VARCHAR, harness_digest VARCHAR,
    policy_digest VARCHAR, machine VARCHAR, driver VARCHAR, libraries VARCHAR
);
CREATE TABLE outcome (
    bundle INTEGER, check_id VARCHAR, status VARCHAR, tier VARCHAR, control VARCHAR, noticed BOOLEAN
);
CREATE TABLE figure (
    bundle INTEGER, check_id VARCHAR, metric VARCHAR, value DOUBLE, low DOUBLE, high DOUBLE
);
"""


class RefusedBundle(Record):
    """A bundle that is not in the index, and why."""

    path: str
    reason: str


class Refreshed(Record):
    """What bringing the index up to date found."""

    schema_version: Literal[1] = 1
    bundles: int
    """In the index now."""
    new: int
    """Read this time."""
    gone: int
    """Places that held a bundle and hold it no longer."""
    copies: int
    """Further places of bundles that are in the index."""
    scores: int
    """Fault scores in the index now."""
    refused: tuple[RefusedBundle, ...]
    """At most twenty."""
    refused_count: int


class Index:
    """An open index. Made by `open_index`, which closes it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def rows(self, query: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Rows of a query of ours; values go in as parameters only."""
        found: list[tuple[Any, ...]] = self._connection.execute(query, list(parameters)).fetchall()
        return found

    def refresh(
        self,
        folder: Path,
        say: Callable[[int, int], None] = lambda done, total: None,
        jobs: int | None = None,
    ) -> Refreshed:
        """Bring the index up to date with `folder`; `say` is told (read, to read) where it takes a while."""
        found = find_bundles(folder)
        known = dict(self.rows("SELECT path, signature FROM source"))
        new = [s for s in found if known.get(s.path) != s.signature]
        gone = set(known) - {s.path for s in found}
        self._forget(gone | {s.path for s in new})
        done = 0
        for sources, batch in _read(folder, new, jobs):
            self._add(sources, batch)
            done += len(sources)
            if len(new) > BATCH:  # less is over before anybody looks
                say(done, len(new))
        self._drop_orphans()
        return self._summary(len(new), len(gone))

    def _forget(self, paths: set[str]) -> None:
        if paths:
            self._connection.execute("DELETE FROM source WHERE path IN (SELECT unnest(?))", [sorted(paths)])

    def _drop_orphans(self) -> None:
        lost = "bundle NOT IN (SELECT bundle FROM source WHERE bundle IS NOT NULL)"
        if self.rows(f"SELECT 1 FROM bundle WHERE {lost} LIMIT 1"):
            for table in ("figure", "outcome", "bundle"):
                self._connection.execute(f"DELETE FROM {table} WHERE {lost}")
        self._connection.execute(
            "DELETE FROM fault WHERE digest NOT IN (SELECT score FROM source WHERE score IS NOT NULL)"
        )

    def _add(self, sources: Sequence[Source], batch: Batch) -> None:
        """One transaction: bundles that are new by digest with what they hold, then every source."""
        digests = [b.digest for b in batch.bundles]
        numbers = dict(
            self.rows("SELECT digest, bundle FROM bundle WHERE digest IN (SELECT unnest(?))", [digests])
        )
        following = int(self.rows("SELECT coalesce(max(bundle), 0) + 1 FROM bundle")[0][0])
        fresh: dict[int, int] = {}
        rows = []
        for place, row in zip(batch.places, batch.bundles, strict=True):
            if row.digest not in numbers:
                numbers[row.digest] = fresh[place] = following
                rows.append((following, *row))
                following += 1
        reasons = {r.place: r.reason for r in batch.refusals}
        of_place = {p: numbers[b.digest] for p, b in zip(batch.places, batch.bundles, strict=True)}
        score_of = {place: rows[0].digest for place, rows in batch.scores if rows}
        known = {d for (d,) in self.rows("SELECT DISTINCT digest FROM fault")}
        faults = {rows[0].digest: rows for _, rows in batch.scores if rows and rows[0].digest not in known}
        entries = [
            (s.path, s.signature, of_place.get(i), reasons.get(i), score_of.get(i))
            for i, s in enumerate(sources)
        ]
        with self._transaction():
            if rows:
                self._insert("bundle", _arrow(("bundle", *BUNDLE_COLUMNS), rows))
                numbered = _arrow(("place", "bundle"), list(fresh.items()))
                for table, content in (("outcome", batch.outcomes), ("figure", batch.figures)):
                    kept = content.join(numbered, "place", join_type="inner").drop_columns("place")
                    names = [n for n in content.column_names if n != "place"]
                    self._insert(table, kept.select(["bundle", *names]))
            if faults:
                self._insert(
                    "fault", _arrow(FAULT_COLUMNS, [row for rows in faults.values() for row in rows])
                )
            self._insert("source", _arrow(("path", "signature", "bundle", "refused", "score"), entries))

    def _insert(self, table: str, content: pa.Table) -> None:
        """All rows at once; row by row would cost milliseconds each."""
        self._connection.register("content", content)
        self._connection.execute(f"INSERT INTO {table} SELECT * FROM content")
        self._connection.unregister("content")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _summary(self, new: int, gone: int) -> Refreshed:
        ((bundles,),) = self.rows("SELECT count(*) FROM bundle")
        ((sources, refused_count),) = self.rows("SELECT count(bundle), count(refused) FROM source")
        ((scores,),) = self.rows("SELECT count(DISTINCT digest) FROM fault")
        refused = self.rows(
            "SELECT path, refused FROM source WHERE refused IS NOT NULL ORDER BY path LIMIT ?", [SHOWN]
        )
        return Refreshed(
            bundles=bundles,
            new=new,
            gone=gone,
            copies=sources - bundles,
            scores=scores,
            refused=tuple(RefusedBundle(path=p, reason=r) for p, r in refused),
            refused_count=refused_count,
        )


@contextmanager
def open_index(file: Path) -> Iterator[Index]:
    """The index in `file`, made where it is missing. Raises `InputError` for a file that is none, or that
    another process has open; `DeviceMissing` where duckdb is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise DeviceMissing(
            f"history needs DuckDB: {error}; install the extra: pip install 'fasttrack[history]'"
        ) from error
    if file.suffix != SUFFIX:  # DuckDB takes other names for tables to read, and keeps nothing
        raise InputError(f"{file}: an index's name ends in {SUFFIX}; name it so with --index")
    file.parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": 2, "autoinstall_known_extensions": False, "autoload_known_extensions": False,
    }  # fmt: skip
    try:
        connection = duckdb.connect(str(file), config=settings)
    except duckdb.Error as error:
        is_busy = "lock" in str(error).lower()
        raise InputError(
            f"{file}: another process has this index open; wait for it, or name another with --index"
            if is_busy
            else f"{file} is no index of bundles; remove it, or name another with --index"
        ) from error
    try:
        _require_ours(connection, file)
        yield Index(connection)
    finally:
        connection.close()


def _require_ours(connection: Any, file: Path) -> None:
    """Tables of this version: made in an empty file, made again in one of another version."""
    tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if tables and "fasttrack_history" not in tables:
        raise InputError(f"{file} is a database of something else; name another file with --index")
    if tables:
        (version,) = connection.execute("SELECT version FROM fasttrack_history").fetchone()
        if version == INDEX_VERSION:
            return
        for name in tables:
            connection.execute(f'DROP TABLE "{name}"')
    connection.execute("BEGIN")
    connection.execute(_TABLES)
    connection.execute("COMMIT")


_ARROW = {
    "bundle": pa.int32(),
    "place": pa.int32(),
    "pr": pa.int64(),
    "created_us": pa.int64(),
    "is_dirty": pa.bool_(),
    "noticed": pa.bool_(),
}


def _arrow(names: Sequence[str], rows: Sequence[Sequence[object]]) -> pa.Table:
    """Rows as columns; text where `_ARROW` names no other type."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(c, _ARROW.get(n, pa.string())) for n, c in zip(names, columns, strict=True)]
    return pa.table(arrays, names=list(names))


def _read(folder: Path, new: Sequence[Source], jobs: int | None) -> Iterator[tuple[Sequence[Source], Batch]]:
    """Batches in order; by several processes where there are many sources."""
    pieces = [new[i : i + BATCH] for i in range(0, len(new), BATCH)]
    jobs = min(jobs or len(os.sched_getaffinity(0)), 4)
    if len(new) <= ALONE or jobs == 1:
        for piece in pieces:
            yield piece, read_batch(str(folder), piece)
        return
    # Spawned, as a fork of a process with DuckDB's threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(pieces, pool.map(read_batch, [str(folder)] * len(pieces), pieces), strict=True)
