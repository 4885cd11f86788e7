"""What of a kernel may be chosen without changing what it computes, what was tried, and what was chosen.

A pack that offers such choices implements `TunablePack` beside `Pack`. Invariant: an entry of a tuned table
is of a configuration that passed the op's tests on the architecture that it names.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, Self

from pydantic import Field, model_validator

from harness.domain.cell import Arch, Cell
from harness.domain.record import Digest, Name, Record, Whole

__all__ = [
    "Comparison", "Configuration", "Ending", "TunablePack", "TunedEntry", "TunedTable", "TuningAxis",
    "TuningRecord", "TuningSpace", "TuningStudy", "TuningTrial", "words_of",
]  # fmt: skip

Configuration = tuple[tuple[str, Whole], ...]
"""Names of axes and the values chosen, in the order of the space."""


class TuningAxis(Record):
    """One thing that may be chosen."""

    name: Name
    values: tuple[Whole, ...] = Field(min_length=1)
    meaning: str = ""


class TuningSpace(Record):
    """The choices of one kernel at one shape."""

    kernel: Name
    """What chooses: an op, or a form of kernel that several ops share."""
    op: str
    """Op by which it is tested and timed here."""
    implementation: Literal["cpu", "cute"]
    shape: tuple[tuple[str, Whole], ...]
    """What the choice depends on."""
    near: tuple[str, ...] = ()
    """Names in `shape` for which the nearest measured entry may stand in; all others must be equal."""
    axes: tuple[TuningAxis, ...] = Field(min_length=1)
    incumbent: Configuration
    """What is chosen now."""

    @model_validator(mode="after")
    def _incumbent_names_every_axis(self) -> Self:
        if tuple(name for name, _ in self.incumbent) != tuple(axis.name for axis in self.axes):
            raise ValueError(f"the incumbent of {self.kernel} does not name every axis in order")
        return self


class Comparison(Record):
    """Incumbent time over the other's, above 1 where the other is faster: the median of paired ratios."""

    ratio: float
    low: float
    high: float
    incumbent_us: float
    other_us: float
    pairs: Whole
    alpha: float
    """Of each end of the interval."""


class Ending(StrEnum):
    """How a trial ended."""

    TIMED = "timed"
    REFUSED = "refused"
    """The pack says that it cannot be built or launched."""
    BELOW_ROOFLINE = "below_roofline"
    """The bytes that it keeps in flight cannot reach the incumbent's time."""
    SLOW = "slow"
    """Early samples are surely slower than the best so far."""
    WRONG = "wrong"
    """A kernel test did not pass: its time does not count."""
    TOO_FAST = "too_fast"
    """Faster than the memory it reads from: not a record but a fault of the measurement."""
    CRASHED = "crashed"


class TuningTrial(Record):
    """One configuration that was tried; winners and losers alike are kept."""

    number: Whole
    configuration: Configuration
    ending: Ending
    words: str = ""
    early: Comparison | None = None
    timing: Comparison | None = None
    """None unless it was timed in full."""
    incumbent_us: tuple[float, ...] = ()
    other_us: tuple[float, ...] = ()
    """Microseconds a call, block by block, in pairs."""
    tests: tuple[tuple[str, str], ...] = ()
    """Kernel checks and their statuses."""


class TuningStudy(Record):
    """The search of one op in one cell."""

    space: TuningSpace
    cell: Cell
    model: str
    seed: Whole
    trials: tuple[TuningTrial, ...]
    space_size: Whole
    """Configurations that the pack does not refuse."""
    ceiling_gb_per_s: float | None
    floor_us: float | None
    """Bytes that a call must move over the ceiling."""
    best: Whole | None
    """Number of the trial that won the search; None where none beat the incumbent."""
    held_out: Comparison | None = None
    """Winner against incumbent on inputs of another seed in a process of its own."""
    null: Comparison | None = None
    """Incumbent against itself in the same run: the noise floor."""
    held_out_seed: Whole | None = None
    held_out_incumbent_us: tuple[float, ...] = ()
    held_out_other_us: tuple[float, ...] = ()
    held_out_null_us: tuple[float, ...] = ()
    verdict: Literal["improved", "confirmed", "demoted", "at_the_roofline", "not_judged"]
    words: str
    chosen: Configuration
    chosen_tests: tuple[tuple[str, str], ...] = ()
    """Kernel checks of the chosen configuration on inputs that the search did not see."""


class TuningRecord(Record):
    """Everything of one `fasttrack tune`."""

    schema_version: Literal[1] = 1
    created: datetime
    machine: str
    arch: Arch
    harness: Digest
    pack: str
    pack_digest: Digest
    command: str
    studies: tuple[TuningStudy, ...]


class TunedEntry(Record):
    """One choice of a tuned table."""

    kernel: Name
    op: str
    implementation: Literal["cpu", "cute"]
    shape: tuple[tuple[str, Whole], ...]
    near: tuple[str, ...] = ()
    configuration: Configuration
    cell: str
    """Label of the cell in which it was measured."""
    model: str
    verdict: Literal["improved", "confirmed", "demoted", "at_the_roofline"]
    measured_us: float | None
    """Of the chosen configuration; None where nothing was timed."""
    gain: float
    """Incumbent time over its time on held-out repeats; 1 where the incumbent stays."""
    trials: Whole
    record: Digest
    """Digest of the tuning record that it comes from."""


class TunedTable(Record):
    """Tuned choices of one architecture."""

    schema_version: Literal[1] = 1
    arch: Arch
    machine: str
    entries: tuple[TunedEntry, ...]

    @model_validator(mode="after")
    def _keys_are_unique(self) -> Self:
        keys = [(e.kernel, e.implementation, e.shape) for e in self.entries]
        if len(set(keys)) != len(keys):
            raise ValueError(f"the tuned table of {self.arch} has two entries for one kernel and shape")
        return self

    def with_entry(self, entry: TunedEntry) -> "TunedTable":
        """The table with one entry put in, in place of an older one of the same kernel and shape."""
        key = (entry.kernel, entry.implementation, entry.shape)
        rest = [e for e in self.entries if (e.kernel, e.implementation, e.shape) != key]
        entries = sorted([*rest, entry], key=lambda e: (e.kernel, e.implementation, e.shape))
        return self.model_copy(update={"entries": tuple(entries)})


class TunablePack(Protocol):
    """What a pack offers beside `Pack` where its kernels have choices. Deciding needs no GPU."""

    def tuning_space(self, op: str, implementation: str, cell: Cell, model: str) -> TuningSpace | None:
        """The choices of an op in a cell; None where it has none."""

    def refused(self, space: TuningSpace, configuration: Configuration) -> str:
        """Why a configuration cannot be built or launched; empty where it can."""

    def floor_us(
        self, space: TuningSpace, configuration: Configuration, moved_bytes: int, ceiling_gb_per_s: float
    ) -> float:
        """Least time of one call by the bytes that it moves and keeps in flight; 0 where nothing is known."""

    def configured(self, space: TuningSpace, configuration: Configuration) -> AbstractContextManager[None]:
        """Inside the block, this process's kernels at the space's shape take the configuration."""

    def build_configurations(
        self, space: TuningSpace, configurations: Sequence[Configuration], folder: Path, processes: int
    ) -> None:
        """Compile configurations ahead into `folder`; does nothing where nothing is compiled."""

    def built(self, space: TuningSpace, folder: Path) -> AbstractContextManager[None]:
        """Inside the block, launches take what `build_configurations` left in `folder`."""

    def tuned_file(self, arch: str) -> Path:
        """Where the tuned table of an architecture lies."""


def words_of(configuration: Configuration) -> str:
    """A configuration in one line."""
    return ", ".join(f"{name} {value}" for name, value in configuration)
