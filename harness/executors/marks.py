"""Stretches of a check's work, timed by who is not at work: a worker says where one begins and ends.

A worker's own clock may have been replaced by the candidate that it runs. The process that started it notes
when each word arrives and adds the stretches to the samples as table `outside` (name, us).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from harness.domain.check import Samples, SampleTable

__all__ = ["Marks", "stretch"]

BEGIN, END = "begin ", "end "


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

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._rows: dict[str, float] = {}

    def add(self, word: str) -> None:
        """A word that has just arrived; the first stretch of a name counts."""
        now = time.perf_counter_ns()
        if word.startswith(BEGIN):
            self._begun.setdefault(word.removeprefix(BEGIN), now)
        elif (name := word.removeprefix(END)) in self._begun:
            self._rows.setdefault(name, (now - self._begun[name]) / 1e3)

    def attach(self, samples: Samples) -> Samples:
        """The samples with what this clock saw, whatever they say of it themselves; unchanged where nothing
        was marked.
        """
        others = tuple(table for table in samples.tables if table.name != "outside")
        if not self._rows:
            return samples.model_copy(update={"tables": others})
        table = SampleTable(name="outside", columns=("name", "us"), rows=tuple(sorted(self._rows.items())))
        return samples.model_copy(update={"tables": (*others, table)})
