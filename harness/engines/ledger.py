"""What the dispatcher decided at every step, kept as it happens.

Append-only JSON lines, flushed step by step, so that a crash leaves every earlier decision readable. Bounded:
after `MAX_LINES` equal decisions are only counted, and the counts are written when the ledger closes. A
`Ledger` is the observer that a pack's session calls; it copies nothing but the record it is given.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from harness.domain.errors import EvidenceError
from harness.domain.pack import Decision

__all__ = ["MAX_LINES", "Ledger", "read_ledger"]

MAX_LINES = 200_000
"""About 60 MB of decisions; beyond it only counts are kept."""


class Ledger:
    """Observer of one session. Use as a context manager; `decisions` are those kept in full."""

    def __init__(self, path: Path, max_lines: int = MAX_LINES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._max_lines = max_lines
        self._overflow: Counter[str] = Counter()
        self.decisions: list[Decision] = []

    def __call__(self, decision: Decision) -> None:
        """Keep one decision; called by the dispatcher before the step runs."""
        if len(self.decisions) < self._max_lines:
            self.decisions.append(decision)
            self._file.write(decision.model_dump_json() + "\n")
            self._file.flush()
        else:
            self._overflow[decision.model_copy(update={"step": -1}).model_dump_json()] += 1

    def close(self) -> None:
        """Write counts of what was not kept in full, and close the file."""
        for line, count in sorted(self._overflow.items()):
            self._file.write(json.dumps({"count": count, "decision": json.loads(line)}) + "\n")
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
            else:
                decisions.append(Decision.model_validate(entry))
        except ValueError as error:
            pending = error
    return tuple(decisions), counted
