"""A collective as a model: each rank's atomic steps over one shared state, so that every order can be tried.

Real collectives fail only in orders that a test machine hardly ever takes (a rank that is one epoch ahead, a
flag that is reset before a peer has read it). A pack that brings its own collective describes it so, beside a
version with a known fault, which must be found.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.domain.record import Scalar

__all__ = ["CollectiveModel", "ModelState", "Program", "Step"]

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
