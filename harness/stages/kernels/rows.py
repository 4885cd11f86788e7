"""Which rows of a comparison must be there: every token of the step, and every healthy one beside a poisoned
request.

The tokens are the cell's, not the samples': a table that leaves out the same tokens everywhere looks whole by
itself. A comparison of nothing is none.
"""

from collections.abc import Iterator
from typing import Any

from harness.domain.cell import Cell
from harness.domain.check import Samples

__all__ = ["missing_rows"]


def missing_rows(cell: Cell, by_token: tuple[str, ...], samples: Samples) -> Iterator[str]:
    """What was not compared of the outputs in `by_token`, which have a row a token; a sentence each."""
    healthy = cell.rows - cell.rows // cell.batch
    yield from _compared_nothing(samples)
    if healthy and not _records(samples, "mates") and not _records(samples, "mates_exact"):
        yield "no request was judged in a step with a poisoned one"
    for output in by_token:
        yield from _output_rows(cell.rows, samples, ("errors", "exact"), output, cell.rows)
        if healthy:
            yield from _output_rows(cell.rows, samples, ("mates", "mates_exact"), output, healthy)


def _compared_nothing(samples: Samples) -> Iterator[str]:
    for table in ("exact", "mates_exact", "repeats"):
        for r in _records(samples, table):
            if not r["elements"]:
                yield f"{r['output']} was compared over no element (table {table})"


def _output_rows(
    whole: int, samples: Samples, tables: tuple[str, str], output: str, rows: int
) -> Iterator[str]:
    """Whether one output was compared for each of the first `rows` tokens of a step of `whole`."""
    inexact, exact = ([r for r in _records(samples, t) if r["output"] == output] for t in tables)
    if not inexact and not exact:
        yield f"output {output} has no row in table {tables[0]} or {tables[1]}"
    tokens: dict[str, set[int]] = {}
    for r in inexact:
        tokens.setdefault(str(r["regime"]), set()).add(int(r["token"]))
    for regime, seen in tokens.items():
        if seen != set(range(rows)):
            yield f"output {output} was compared for {len(seen)} tokens in regime {regime}, not {rows}"
    spoiled = (r["elements"] for r in _records(samples, "control_exact") if r["output"] == output)
    elements = int(next(spoiled, 0)) * rows // whole
    for r in exact:
        if r["elements"] != elements:
            said = f"compared over {r['elements']} elements in regime {r['regime']}, not {elements}"
            yield f"output {output} was {said}"


def _records(samples: Samples, name: str) -> tuple[dict[str, Any], ...]:
    table = samples.table(name)
    return table.records() if table else ()
