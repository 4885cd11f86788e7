"""What a stage's sample tables must hold before anybody judges them.

Samples come from other machines, so a judge may trust neither their columns nor their values. A stage
declares the shape of each of its tables once; `misshapen` says what does not fit, and `unusable` makes that
an outcome of status INVALID. Invariant: samples in which nothing is misshapen have every declared column, no
value of another type, no number that arithmetic on a few million of them could carry out of range, and no row
twice.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.domain.check import Check, Outcome, Samples, SampleTable, Status
from harness.domain.record import MAX_WHOLE, Scalar

__all__ = [
    "COUNT", "FLAG", "NUMBER", "POSITIVE", "SIZE", "TEXT", "TOKENS", "Column", "TableShape",
    "choice", "misshapen", "optional", "unusable",
]  # fmt: skip

LIMIT = 1e60
"""Beyond what any instrument says: the largest planted error is 1e30, and its square still fits."""
MAX_SHOWN = 4
_TOKENS = re.compile(r"(\d{1,9}( \d{1,9})*)?")


@dataclass(frozen=True, slots=True)
class Column:
    """The values that one column may hold."""

    kind: Literal["text", "tokens", "flag", "count", "size", "number", "positive"]
    """`tokens`: token ids in decimal, one space between; `count`: whole, from 0; `size`: whole, from 1;
    `number`: from 0; `positive`: above 0.
    """
    is_optional: bool = False
    choices: frozenset[str] = frozenset()
    """The only texts allowed; empty: any."""

    def fits(self, value: Scalar) -> bool:
        """Whether a value may stand in this column."""
        if value is None:
            return self.is_optional
        if self.kind == "flag":
            return isinstance(value, bool)
        if self.kind in ("text", "tokens"):
            return isinstance(value, str) and self._fits_text(value)
        if isinstance(value, bool | str):
            return False
        if self.kind in ("count", "size"):
            return isinstance(value, int) and (self.kind == "size") <= value <= MAX_WHOLE
        return 0 <= value <= LIMIT and (value > 0 or self.kind == "number")

    def _fits_text(self, value: str) -> bool:
        if self.kind == "tokens":
            return _TOKENS.fullmatch(value) is not None
        return not self.choices or value in self.choices


TEXT, TOKENS, FLAG = Column("text"), Column("tokens"), Column("flag")
COUNT, SIZE = Column("count"), Column("size")
NUMBER, POSITIVE = Column("number"), Column("positive")


def choice(*texts: str) -> Column:
    """A column that holds one of these texts."""
    return Column("text", choices=frozenset(texts))


def optional(column: Column) -> Column:
    """The column, where a value may also be missing."""
    return Column(column.kind, is_optional=True, choices=column.choices)


@dataclass(frozen=True, slots=True)
class TableShape:
    """One table of a stage."""

    columns: Mapping[str, Column]
    """In the order in which they are sampled."""
    key: tuple[str, ...] = ()
    """Columns that tell rows apart: no two rows agree in all of them. Empty: rows may repeat."""
    is_required: bool = False
    """Whether the table must be there and hold a row."""
    max_rows: int | None = None


def misshapen(samples: Samples, shapes: Mapping[str, TableShape]) -> tuple[str, ...]:
    """What about the tables does not fit their shapes, a sentence each; empty where all of it does."""
    names = [table.name for table in samples.tables]
    found = [f"table {name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    found += [f"table {name!r} is none of this check's" for name in names if name not in shapes]
    found += [
        f"table {name!r} is missing or empty"
        for name, shape in shapes.items()
        if shape.is_required and not any(t.name == name and t.rows for t in samples.tables)
    ]
    for table in samples.tables:
        if table.name in shapes:
            found += _table_faults(table, shapes[table.name])
    return tuple(found)


def unusable(check: Check, samples: Samples, faults: tuple[str, ...]) -> Outcome:
    """The outcome of samples that nobody can judge."""
    more = f" (and {len(faults) - MAX_SHOWN} more)" if len(faults) > MAX_SHOWN else ""
    return Outcome(
        check=check.id,
        status=Status.INVALID,
        tier=samples.tier,
        summary=f"the samples cannot be judged: {'; '.join(faults[:MAX_SHOWN])}{more}",
        next_step="sample this check again with the harness that judges it; these rows were edited, or made "
        "by another version",
    )


def _table_faults(table: SampleTable, shape: TableShape) -> Iterator[str]:
    if table.columns != tuple(shape.columns):
        said = ", ".join(table.columns)[:160]
        yield f"table {table.name!r} has columns {said}, not {', '.join(shape.columns)}"
        return
    if shape.max_rows is not None and len(table.rows) > shape.max_rows:
        yield f"table {table.name!r} has {len(table.rows)} rows, not {shape.max_rows}"
    for place, (name, column) in enumerate(shape.columns.items()):
        wrong = next((n for n, row in enumerate(table.rows) if not column.fits(row[place])), None)
        if wrong is not None:
            value = repr(table.rows[wrong][place])[:60]
            yield f"{table.name}.{name} is {value} in row {wrong + 1}, which is no {_said(column)}"
    if shape.key:
        places = [table.columns.index(name) for name in shape.key]
        keys = [tuple(row[p] for p in places) for row in table.rows]
        if len(set(keys)) != len(keys):
            yield f"table {table.name!r} has two rows of one {', '.join(shape.key)}"


def _said(column: Column) -> str:
    words = {
        "text": "text", "tokens": "sequence of token ids", "flag": "true or false",
        "count": "count from 0", "size": "count from 1", "number": "number from 0",
        "positive": "number above 0",
    }[column.kind]  # fmt: skip
    return f"one of {', '.join(sorted(column.choices))}" if column.choices else words
