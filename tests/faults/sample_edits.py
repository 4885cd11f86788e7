"""Samples as a faulty sampler would have left them: rows of one table changed, doubled or left out."""

from collections.abc import Callable, Iterable
from typing import Any

from harness.domain.check import Samples

__all__ = ["Row", "edit_rows", "each", "retimed"]

Row = dict[str, Any]


def edit_rows(samples: Samples, table: str, edit: Callable[[list[Row]], Iterable[Row]]) -> Samples:
    """The samples with one table's rows as `edit` gives them; `KeyError` where there is no such table."""
    if samples.table(table) is None:
        raise KeyError(table)
    tables = tuple(
        t.model_copy(
            update={
                "rows": tuple(tuple(r[c] for c in t.columns) for r in edit([dict(r) for r in t.records()]))
            }
        )
        if t.name == table
        else t
        for t in samples.tables
    )
    return samples.model_copy(update={"tables": tables})


def each(change: Callable[[Row], Row | None]) -> Callable[[list[Row]], list[Row]]:
    """`change` on every row; None leaves it out."""
    return lambda rows: [new for row in rows if (new := change(row)) is not None]


def retimed(samples: Samples, edit: Callable[[list[Row]], Iterable[Row]]) -> Samples:
    """The samples of a sweep whose times are what `edit` makes of them, by every clock."""
    table = samples.table("timings")
    before = {f"{r['arm']}.{r['block']}": float(r["us"] or 0.0) for r in (table.records() if table else ())}
    edited = edit_rows(samples, "timings", edit)
    changed = edited.table("timings")
    after = {
        f"{r['arm']}.{r['block']}": float(r["us"] or 0.0) for r in (changed.records() if changed else ())
    }

    def shifted(row: Row) -> Row:
        name = row["name"]
        return row | {"us": row["us"] * after[name] / before[name]} if name in after else row

    return edit_rows(edited, "outside", each(shifted))
