"""An eval's ledger as tables: what the arms generated on which path and why, in which batches, and in which
cells of the envelope; and whether the cells that the policy demands hold anything.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from harness.domain.cell_tokens import GENERATED, empty_cells, parse_needs
from harness.domain.check import Check, Samples, SampleTable, Status
from harness.domain.record import Scalar
from harness.engines.serving import StepTotal
from harness.stages.evals.shares import NEXT_STEPS, rows_of

__all__ = ["cell_faults", "ledger_tables", "lacking_cells", "steps_to_fill"]

Steps = Mapping[tuple[str, StepTotal], int]
"""Tokens by arm and kind of step."""
STEP_COLUMNS = ("arm", "phase", "path", "reason", "tokens")
LOAD_COLUMNS = ("arm", "phase", "requests", "tokens")
CELL_COLUMNS = ("arm", "phase", "path", "requests", "context", "drafts", "tokens")


def ledger_tables(steps: Steps, *, has_loads: bool = False) -> tuple[SampleTable, ...]:
    """Tables `steps`, `cells` and, where asked for, `loads`."""
    by_path: Counter[tuple[Scalar, ...]] = Counter()
    loads: Counter[tuple[Scalar, ...]] = Counter()
    cells: Counter[tuple[Scalar, ...]] = Counter()
    for (arm, kind), tokens in steps.items():
        by_path[arm, kind.phase, kind.path, kind.reason] += tokens
        loads[arm, kind.phase, kind.requests] += tokens
        if kind.phase in GENERATED:
            cells[arm, kind.phase, kind.path, kind.requests, kind.context, kind.drafts] += tokens
    tables = (
        _table("steps", STEP_COLUMNS, by_path),
        _table("cells", CELL_COLUMNS, cells),
    )
    return (*tables, _table("loads", LOAD_COLUMNS, loads)) if has_loads else tables


def cell_faults(samples: Samples) -> tuple[str, ...]:
    """Where the tokens by cell are not those that the ledger's other tables total by path, and by requests in
    a step; samples may have no cells at all.
    """
    if samples.table("cells") is None:
        return ()
    others = [("steps", "path")] + ([("loads", "requests")] if samples.table("loads") is not None else [])
    return tuple(fault for table, column in others for fault in _unlike(samples, table, column))


def _unlike(samples: Samples, table: str, column: str) -> Iterator[str]:
    """Sums of the cells by arm, phase and a column that are not the table's own."""
    cells, told = _sums(samples, "cells", column), _sums(samples, table, column)
    for key in sorted(cells.keys() | told.keys(), key=str):
        if cells[key] != told[key]:
            arm, phase, value = key
            yield (
                f"arm {arm} generated {told[key]} tokens in {phase} steps with {column} {value}, and its "
                f"cells hold {cells[key]}"
            )


def lacking_cells(check: Check, samples: Samples) -> str | None:
    """Which cells that the policy demands of this eval hold too few tokens; None where none does."""
    needs = parse_needs(str(dict(check.parameters).get("cells") or "[]"))
    short = empty_cells(needs, rows_of(samples, "cells"))
    if not short:
        return None
    named = "; ".join(f"{need.words()}: {found} of {need.min_tokens}" for need, found in short)
    return f"the policy demands tokens of the optimised path in cells that lack them ({named})"


def steps_to_fill(check: Check) -> Mapping[Status, str]:
    """What to do by status, where a demanded cell is what lacks."""
    command = f"`fasttrack run evals --only {check.id} --tier {check.tier.value} --full`"
    return {
        **NEXT_STEPS,
        Status.NO_EVIDENCE: f"ask as many at once, and as long, as the cell says: {command}",
    }


def _sums(samples: Samples, table: str, column: str) -> Counter[tuple[Scalar, ...]]:
    found: Counter[tuple[Scalar, ...]] = Counter()
    for row in rows_of(samples, table):
        if row["phase"] in GENERATED:
            found[row["arm"], row["phase"], row[column]] += int(row["tokens"] or 0)
    return found


def _table(name: str, columns: tuple[str, ...], counts: Counter[tuple[Scalar, ...]]) -> SampleTable:
    rows = tuple((*key, tokens) for key, tokens in sorted(counts.items(), key=lambda item: str(item[0])))
    return SampleTable(name=name, columns=columns, rows=rows)
