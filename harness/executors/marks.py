"""Stretches of a check's work, timed by who is not at work: a worker says where one begins and ends.

A worker's own clock may have been replaced by the candidate that it runs. The process that started it notes
when each word arrives and adds the stretches to the samples as table `outside` (name, us). One name is
special: what is done under `SHARED` serves other checks too, or is a wait for who does it, so that it is no
part of the check's own time (`Marks.deadline`) and not among the samples.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from harness.domain.check import Samples, SampleTable

__all__ = ["SHARED", "SHARED_MOST_S", "Marks", "stretch"]

BEGIN, END = "begin ", "end "
SHARED = "shared"
"""Name of a stretch that does not count towards the check's own time."""
SHARED_MOST_S = 3600.0
"""Most that the shared stretches of all checks of one sampler may take together."""


class Marker(Protocol):
    """Says that something begins or ends now."""

    def __call__(self, word: str, /) -> object: ...


@contextmanager
def stretch(mark: Marker, name: str) -> Iterator[None]:
    """The work inside is a stretch of this name."""
    mark(f"{BEGIN}{name}")
    yield
    mark(f"{END}{name}")


class Marks:
    """When words arrived, on this process's clock."""

    def __init__(self, shared_before_s: float = 0.0) -> None:
        """`shared_before_s`: what earlier checks of the same sampler shared, so that less is left."""
        self._begun: dict[str, int] = {}
        self._rows: dict[str, float] = {}
        self._shared_s = 0.0
        self._shared_most_s = max(0.0, SHARED_MOST_S - shared_before_s)
        self._shared_since: float | None = None

    def add(self, word: str) -> None:
        """A word that has just arrived; the first stretch of a name counts, of shared ones all."""
        if word in (BEGIN + SHARED, END + SHARED):
            self._add_shared(word == BEGIN + SHARED)
            return
        now = time.perf_counter_ns()
        if word.startswith(BEGIN):
            self._begun.setdefault(word.removeprefix(BEGIN), now)
        elif (name := word.removeprefix(END)) in self._begun:
            self._rows.setdefault(name, (now - self._begun[name]) / 1e3)

    def deadline(self, own: float) -> float:
        """Until when to wait, on the monotonic clock, where the check's own time ends at `own` without what
        was shared.
        """
        return own + (self._shared_s if self._shared_since is None else self._shared_most_s)

    def shared_s(self) -> float:
        """Seconds shared until now, a stretch that has not ended included."""
        if self._shared_since is None:
            return self._shared_s
        return min(self._shared_most_s, self._shared_s + time.monotonic() - self._shared_since)

    def _add_shared(self, is_begin: bool) -> None:
        self._shared_s = self.shared_s()
        self._shared_since = time.monotonic() if is_begin else None

    def attach(self, samples: Samples) -> Samples:
        """The samples with what this clock saw, whatever they say of it themselves; unchanged where nothing
        was marked.
        """
        others = tuple(table for table in samples.tables if table.name != "outside")
        if not self._rows:
            return samples.model_copy(update={"tables": others})
        table = SampleTable(name="outside", columns=("name", "us"), rows=tuple(sorted(self._rows.items())))
        return samples.model_copy(update={"tables": (*others, table)})
