"""Generated tokens by cell of the envelope: what a run is evidence about, and what a policy demands of it.

A run counts each decode or verify step where it fell: in how many requests, from which context on, with
how many drafts. Contexts are counted by powers of two; a demand that begins between two of them is met by
what lies above, so that no context counts that is shorter than what was asked for.
"""

from collections.abc import Iterable, Mapping

from pydantic import TypeAdapter

from harness.domain.record import Record, Scalar, Whole
from harness.domain.table_shape import COUNT, SIZE, TableShape, choice

__all__ = ["CELL_SHAPE", "GENERATED", "CellNeed", "context_power", "empty_cells", "needs_text", "parse_needs"]

GENERATED = ("decode", "verify")
"""Phases whose tokens count: a prefill always runs stock."""
CELL_SHAPE = TableShape(
    {
        "arm": choice("stock", "optimised", "poison"),
        "phase": choice(*GENERATED),
        "path": choice("stock", "optimised"),
        "requests": SIZE,
        "context": COUNT,
        "drafts": COUNT,
        "tokens": COUNT,
    },
    key=("arm", "phase", "path", "requests", "context", "drafts"),
)
"""Table `cells`: `context` is the power of two at or below the shortest context of a step, 0 where nobody
told."""


class CellNeed(Record):
    """A part of the envelope in which the optimised path must have generated so many tokens."""

    batch_min: Whole
    batch_max: Whole
    """Requests in a step, both ends included: a bucket."""
    context: Whole
    """Least context."""
    drafts: Whole = 0
    min_tokens: Whole

    def words(self) -> str:
        """Such as `batch 5 to 8, context from 1024, 3 drafts`."""
        batch = (
            f"batch {self.batch_max}"
            if self.batch_min == self.batch_max
            else f"batch {self.batch_min} to {self.batch_max}"
        )
        drafts = f", {self.drafts} draft{'' if self.drafts == 1 else 's'}" if self.drafts else ""
        return f"{batch}, context from {self.context}{drafts}"


_NEEDS = TypeAdapter(tuple[CellNeed, ...])


def needs_text(needs: Iterable[CellNeed]) -> str:
    """Needs as a check carries them: one parameter of JSON text."""
    return _NEEDS.dump_json(tuple(needs)).decode()


def parse_needs(text: str) -> tuple[CellNeed, ...]:
    """The needs of such a text; raises `ValueError`."""
    return _NEEDS.validate_json(text)


def context_power(context: int) -> int:
    """The power of two at or below a context; 0 of 0."""
    return 1 << context.bit_length() - 1 if context > 0 else 0


def empty_cells(
    needs: Iterable[CellNeed], rows: Iterable[Mapping[str, Scalar]]
) -> tuple[tuple[CellNeed, int], ...]:
    """(need, tokens that there were) of each need that the optimised arm's `cells` do not meet."""
    kept = [r for r in rows if r["arm"] == "optimised" and r["path"] == "optimised"]
    short = []
    for need in needs:
        found = sum(
            int(r["tokens"] or 0)
            for r in kept
            if need.batch_min <= int(r["requests"] or 0) <= need.batch_max
            and int(r["context"] or 0) >= need.context
            and int(r["drafts"] or 0) == need.drafts
        )
        if found < need.min_tokens:
            short.append((need, found))
    return tuple(short)
