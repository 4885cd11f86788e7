"""Every way in which one cell, column or row of a sample table can be wrong, for tests of all judges."""

from collections.abc import Iterator, Mapping

from harness.domain.check import Samples, SampleTable
from harness.domain.record import Scalar
from harness.domain.table_shape import Column, TableShape

__all__ = ["spoiled", "with_rows", "without_rows"]

WRONG: Mapping[str, tuple[Scalar, ...]] = {
    "text": (3, True),
    "tokens": (3, "1 two", "9" * 5000),
    "flag": (1, "true", 0.0),
    "count": (-1, 0.5, "1", True, 10**400),
    "size": (0, -1, 0.5, 10**400),
    "number": (-1, -0.5, "1", True, 1e61, 10**400),
    "positive": (0, 0.0, -0.5, "1", 10**400),
}


def spoiled(samples: Samples, shapes: Mapping[str, TableShape]) -> Iterator[tuple[str, Samples]]:
    """(what was done, the samples): each differs from a sound one in a single place."""
    for table in samples.tables:
        shape = shapes[table.name]
        assert table.columns == tuple(shape.columns)
        yield f"{table.name} twice", samples.model_copy(update={"tables": (*samples.tables, table)})
        renamed = table.model_copy(update={"name": "stranger"})
        yield (
            f"{table.name} beside a stranger",
            samples.model_copy(update={"tables": (*samples.tables, renamed)}),
        )
        for place, (name, column) in enumerate(shape.columns.items()):
            yield f"{table.name} without {name}", _with_table(samples, _without_column(table, place))
            for value in _wrong_values(column):
                for row in sorted({0, len(table.rows) - 1}) if table.rows else ():
                    cells = [*table.rows[row]]
                    cells[place] = value
                    rows = (*table.rows[:row], tuple(cells), *table.rows[row + 1 :])
                    yield f"{table.name}.{name} = {value!r:.20}", with_rows(samples, table.name, rows)
        if shape.key and table.rows:
            doubled = with_rows(samples, table.name, (*table.rows, table.rows[0]))
            yield f"{table.name} with a row twice", doubled
        if shape.is_required:
            yield f"{table.name} without rows", with_rows(samples, table.name, ())


def with_rows(samples: Samples, name: str, rows: tuple[tuple[Scalar, ...], ...]) -> Samples:
    """The samples with other rows in one table."""
    table = samples.table(name)
    assert table is not None
    return _with_table(samples, table.model_copy(update={"rows": rows}))


def without_rows(samples: Samples, name: str, **values: Scalar) -> Samples:
    """The samples without the rows of a table that have all of these values."""
    table = samples.table(name)
    assert table is not None
    rows = tuple(
        row
        for row, record in zip(table.rows, table.records(), strict=True)
        if any(record[key] != value for key, value in values.items())
    )
    assert len(rows) < len(table.rows)
    return with_rows(samples, name, rows)


def _wrong_values(column: Column) -> tuple[Scalar, ...]:
    missing: tuple[Scalar, ...] = () if column.is_optional else (None,)
    strange: tuple[Scalar, ...] = ("no such word",) if column.choices else ()
    return (*WRONG[column.kind], *missing, *strange)


def _without_column(table: SampleTable, place: int) -> SampleTable:
    columns = table.columns[:place] + table.columns[place + 1 :]
    rows = tuple(row[:place] + row[place + 1 :] for row in table.rows)
    return table.model_copy(update={"columns": columns, "rows": rows})


def _with_table(samples: Samples, changed: SampleTable) -> Samples:
    tables = tuple(changed if t.name == changed.name else t for t in samples.tables)
    return samples.model_copy(update={"tables": tables})
