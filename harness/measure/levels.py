"""Whether the parts of something explain its gain: ops of a layer, layers of a step. Pure.

Time saved is stock's time less the other arm's; its interval comes from the interval of their ratio, at
stock's time. Parts are timed alone, each from memory, and their sum is held against the whole as it is. What
is left over (waits between kernels, work that overlaps, a part nobody timed) is a figure of its own: a gap.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.domain.cell import Cell
from harness.domain.check import Check, Figure, Outcome

__all__ = ["Level", "Part", "Saved", "reconciled", "saved_by"]


class Saved(NamedTuple):
    """Microseconds saved, and the interval."""

    us: float
    low: float
    high: float


class Part(NamedTuple):
    """One part of a whole."""

    kind: str
    times: int
    saved: Saved | None
    """By all of them together; None where nobody timed it."""


class Level(NamedTuple):
    """A whole beside its parts."""

    check: Check
    saved: Saved
    parts: tuple[Part, ...]

    @property
    def explained(self) -> Saved:
        """By the parts that were timed, together."""
        timed = [part.saved for part in self.parts if part.saved is not None]
        return Saved(sum(s.us for s in timed), sum(s.low for s in timed), sum(s.high for s in timed))

    @property
    def gap(self) -> Saved:
        """The whole less its parts, from the least to the most that the intervals allow."""
        parts = self.explained
        return Saved(self.saved.us - parts.us, self.saved.low - parts.high, self.saved.high - parts.low)

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts that nobody timed in this cell."""
        return tuple(part.kind for part in self.parts if part.saved is None)

    @property
    def is_explained(self) -> bool:
        """Whether every part was timed and no gap is left for sure."""
        return not self.missing and self.gap.low <= 0 <= self.gap.high

    def words(self) -> str:
        """One phrase."""
        if self.missing:
            return f"not timed in this cell: {', '.join(self.missing)}"
        if self.is_explained:
            return "explained within the interval"
        share = self.gap.us / self.saved.us if self.saved.us else 0.0
        return f"gap of {self.gap.us:+.1f} us, {abs(share):.0%} of what was saved"


def saved_by(outcome: Outcome) -> Saved | None:
    """What one cell saved; None where its times or their interval are missing. The noise floor widens it."""
    figures: Mapping[str, Figure] = {f.name: f for f in outcome.figures}
    stock, mine, ratio, noise = (
        figures.get(name) for name in ("stock_us", "optimised_us", "ratio", "noise_floor")
    )
    if any(f is None or f.value is None for f in (stock, mine, ratio)) or ratio is None:
        return None
    if ratio.low is None or ratio.high is None or stock is None or mine is None:
        return None
    stock_us = float(stock.value or 0.0)
    wide = stock_us * (float(noise.value or 0.0) if noise is not None else 0.0)
    low, high = (stock_us - stock_us / end for end in (ratio.low, ratio.high))
    return Saved(stock_us - float(mine.value or 0.0), low - wide, high + wide)


def reconciled(pairs: Sequence[tuple[Check, Outcome]]) -> tuple[Level, ...]:
    """Every cell that names its parts (parameter `parts`: `op.router`, or `op.attn_res*2` for two of them),
    beside the cells of these parts.
    """
    by_kind: dict[str, list[tuple[Cell, Saved]]] = {}
    for check, outcome in pairs:
        saved, kind = saved_by(outcome), dict(check.parameters).get("kind")
        if saved is not None and check.cell is not None and kind is not None:
            by_kind.setdefault(str(kind), []).append((check.cell, saved))
    found = []
    for check, outcome in pairs:
        named, saved = dict(check.parameters).get("parts"), saved_by(outcome)
        if named and saved is not None and check.cell is not None:
            parts = tuple(_part(word, check.cell, by_kind) for word in str(named).split())
            found.append(Level(check, saved, parts))
    return tuple(found)


def _part(word: str, cell: Cell, by_kind: Mapping[str, list[tuple[Cell, Saved]]]) -> Part:
    kind, _, count = word.partition("*")
    times = int(count or 1)
    saved = _alike(cell, by_kind.get(kind, ()))
    if saved is None:
        return Part(kind, times, None)
    return Part(kind, times, Saved(*(times * us for us in saved)))


def _alike(cell: Cell, timed: Sequence[tuple[Cell, Saved]]) -> Saved | None:
    """What was saved in the same cell; ops whose work does not grow with the context are timed at one."""
    contexts = {other.context for other, _ in timed}
    for other, saved in timed:
        here = cell if len(contexts) > 1 else cell.model_copy(update={"context": other.context})
        if other == here:
            return saved
    return None
