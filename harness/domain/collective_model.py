"""A collective as a model: each rank's atomic steps over one shared state, so that every order can be tried.

Real collectives fail only in orders that a test machine hardly ever takes (a rank that is one epoch ahead, a
flag that is reset before a peer has read it). A pack that brings its own collective describes it so, beside a
version with a known fault, which must be found.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.domain.record import Scalar

__all__ = ["CollectiveModel", "CollectiveTrial", "ModelState", "Program", "Step"]

ModelState = dict[str, Scalar]
"""Shared memory: flags, buffers and what each rank has read, by name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One atomic step of one rank."""

    label: str
    run: Callable[[ModelState], str | None]
    """Changes the state; gives what is wrong where the step sees a wrong value."""
    may_run: Callable[[ModelState], bool] = lambda _: True
    """A wait: the step stands until this holds."""


Program = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """One collective."""

    name: str
    start: Mapping[str, Scalar]
    ranks: tuple[Program, ...]
    planted: tuple[Program, ...]
    """The same with a fault that some order shows: the control."""
    names: tuple[str, ...] = ()
    """What the programs are called, where a rank has several; empty: rank 0, rank 1 and so on."""

    def name_of(self, program: int) -> str:
        """How a program is spoken of."""
        return self.names[program] if self.names else f"rank {program}"


@dataclass(frozen=True, slots=True)
class CollectiveTrial:
    """A pack's exchanges put to the test on GPUs by a program of the pack."""

    name: str
    played: tuple[int, ...]
    """Numbers of ranks that one GPU can play."""
    command: Callable[[int, bool, Path], tuple[str, ...]]
    """Its arguments for so many ranks, whether one GPU plays them, and the file that it writes: a JSON line a
    trial with `trial`, `wrong_words`, `fault` (empty where there is none) and `is_control`.
    """
    collective: str = ""
    """The way for ranks to meet that it tries, as a claim names it; empty: none that a claim names."""
