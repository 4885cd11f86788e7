"""What the dispatcher decided at every step, kept as it happens.

Append-only JSON lines, one write a step and no buffer, so that a crash leaves every earlier decision
readable. A decision that differs from an earlier one only in its step and contexts refers to that one's line,
and its record is made when somebody asks: keeping it costs about 3 us, half of it the write. Bounded: after
`MAX_LINES` equal decisions are only counted, and the counts are written when the ledger closes. A `Ledger` is
the observer that a pack's session calls.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from harness.domain.errors import EvidenceError
from harness.domain.pack import Decision

__all__ = ["MAX_LINES", "Ledger", "read_ledger"]

MAX_LINES = 50_000
"""About 4 MB of lines and 8 MB of memory; beyond it only counts are kept."""
LINE = b'{"like":%d,"step":%d,"context":[%d,%d]}\n'
"""Of a decision that an earlier line, by number, holds but for these."""


class Ledger:
    """Observer of one session. Use as a context manager; `decisions` are those kept in full."""

    def __init__(self, path: Path, max_lines: int = MAX_LINES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._write = self._file.write
        self._max_lines = max_lines
        self._first: dict[tuple[object, ...], int] = {}
        self._kept: list[Decision | tuple[int, int, int, int]] = []
        self._overflow: Counter[str] = Counter()

    def __call__(self, decision: Decision) -> None:
        """Keep one decision, or anything with its fields; called by the dispatcher before the step runs."""
        d, kept = decision, self._kept
        number = len(kept)
        if number >= self._max_lines:
            one = Decision.of(d).model_copy(update={"step": -1})
            self._overflow[one.model_dump_json()] += 1
            return
        key = (
            d.phase, d.requests, d.rows, d.tokens, d.batch_bucket, d.is_graph, d.tp, d.dcp, d.drafts, d.path,
            d.reason, d.layer_paths, d.collective, d.tuned,
        )  # fmt: skip
        like = self._first.setdefault(key, number)
        if like == number:
            record = Decision.of(d)
            kept.append(record)
            self._write(f"{record.model_dump_json()}\n".encode())
            return
        own = (like, d.step, d.context_min, d.context_max)
        kept.append(own)
        self._write(LINE % own)

    @property
    def decisions(self) -> list[Decision]:
        """Every decision that was kept in full, in order."""
        made: list[Decision] = []
        for entry in self._kept:
            made.append(entry if isinstance(entry, Decision) else _moved(made[entry[0]], *entry[1:]))
        return made

    def close(self) -> None:
        """Write counts of what was not kept in full, and close the file."""
        for line, count in sorted(self._overflow.items()):
            self._file.write((json.dumps({"count": count, "decision": json.loads(line)}) + "\n").encode())
        self._overflow.clear()
        self._file.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_ledger(lines: Iterable[str]) -> tuple[tuple[Decision, ...], int]:
    """Decisions in order, and how many more were only counted; a torn last line is left out.

    Raises `EvidenceError` for a line that is no decision and is not the last.
    """
    decisions: list[Decision] = []
    counted = 0
    pending: Exception | None = None
    for number, line in enumerate(lines, 1):
        if pending is not None:
            raise EvidenceError(f"ledger line {number - 1} is no decision: {pending}") from pending
        try:
            entry = json.loads(line)
            if "count" in entry:
                counted += int(entry["count"])
            elif "like" in entry:
                low, high = entry["context"]
                decisions.append(_moved(_earlier(decisions, entry["like"]), entry["step"], low, high))
            else:
                decisions.append(Decision.model_validate(entry))
        except (ValueError, KeyError, TypeError) as error:
            pending = error
    return tuple(decisions), counted


def _earlier(decisions: list[Decision], number: object) -> Decision:
    if not isinstance(number, int) or not 0 <= number < len(decisions):
        raise ValueError(f"it refers to decision {number!r}, which no earlier line holds")
    return decisions[number]


def _moved(like: Decision, step: int, low: int, high: int) -> Decision:
    """A decision in another step, over other contexts."""
    own = {"step": step, "context_min": low, "context_max": high}
    return Decision.model_validate(like.model_dump() | own)
