"""A coverage check before it has thresholds, a tier and a cost: what it is about, in how many steps."""

from dataclasses import dataclass

from harness.domain.cell import Cell
from harness.domain.record import Scalar

__all__ = ["Wanted", "steps_of"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One check to be: its kind and name, where it looks and what a PASS says."""

    kind: str
    name: str
    cell: Cell
    proves: str
    op: str | None = None
    more: tuple[tuple[str, Scalar], ...] = ()
    steps: int | None = None
    subject: str = ""
    """What the sampler reads; the name where it is empty."""
    min_tokens: int | None = None
    """What a demanded cell must hold, where that is more than the policy's own `min_tokens`."""
    unavailable: str | None = None
    is_demanded: bool = False
    is_optional: bool = False
    """What no policy asks for unless it names the kind."""
    model: str = ""
    """The pack's small model where it is empty."""


def steps_of(wanted: Wanted) -> int:
    """Few where only the decision counts, or where a batch is large."""
    if wanted.kind == "decline":
        return 2
    if wanted.kind in ("poison", "state", "feature") or (wanted.kind == "path" and wanted.cell.batch <= 16):
        return 4
    return 6 if wanted.cell.batch <= 16 else 3
