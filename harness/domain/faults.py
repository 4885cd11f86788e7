"""How good the harness is: what became of every planted fault, and of its repaired twin.

Invariant: a fault counts as caught only where a check that passes for the repaired twin does not pass for the
fault. A score belongs to one harness, by digest: another harness has another score.
"""

from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from harness.domain.machine import Tier
from harness.domain.record import Digest, Name, Record, Whole

__all__ = [
    "COLUMNS", "AlarmRun", "FaultCell", "FaultColumn", "FaultResult", "FaultScore", "FaultTarget",
    "FaultVerdict", "Sighting",
]  # fmt: skip

FaultColumn = Literal["isolation", "audit", "kernels", "coverage", "evals", "sweep", "bundle"]
"""The six stages, and `bundle verify` with the gate."""
COLUMNS: tuple[FaultColumn, ...] = (
    "isolation", "audit", "kernels", "coverage", "evals", "sweep", "bundle",
)  # fmt: skip
FaultTarget = Literal[
    "op", "dispatcher", "engine", "collective", "kernel", "eval", "timing", "change", "result"
]
"""What a fault is a small patch of."""
FaultVerdict = Literal["caught", "caught_elsewhere", "missed", "skipped", "broken"]


class Sighting(Record):
    """What one check said, or one step of looking at a bundle."""

    column: FaultColumn
    subject: str
    """A check's id, or what was done with the bundle: `verify`, `gate`, `diff`."""
    status: str
    """A check's status; for bundles `PASS` where nothing was objected to, else `REFUSED`."""
    words: str = Field(max_length=600)
    is_statistical: bool = False
    """Whether noise alone can move it; a deterministic check never raises a false alarm."""

    @property
    def objects(self) -> bool:
        """Whether the harness did not accept what it saw."""
        return self.status not in ("PASS", "SKIPPED")

    @property
    def is_alarm(self) -> bool:
        """Whether, seen on a repaired twin, it accuses: too few samples accuse nobody."""
        return self.objects and self.status != "INCONCLUSIVE"


class FaultCell(Record):
    """One fault in one column: the sightings that decided."""

    column: FaultColumn
    checks: Whole
    is_caught: bool
    seen: Sighting
    """The first objection to the fault that the twin did not raise; else the first sighting."""


class FaultResult(Record):
    """What became of one fault."""

    name: Name
    title: str
    report: str
    """The public report it stands for."""
    target: FaultTarget
    expected: FaultColumn
    tier: Tier
    """Cheapest tier at which it can be caught."""
    suite: str
    """Entry point that registered it."""
    verdict: FaultVerdict
    reason: str = ""
    """Why it was skipped or broke, or why it is a known gap."""
    cells: tuple[FaultCell, ...] = ()
    false_alarms: tuple[Sighting, ...] = ()
    """Accusations of the repaired twin."""
    duration_s: float = Field(ge=0)

    @model_validator(mode="after")
    def _verdict_follows_from_the_cells(self) -> Self:
        caught = [c.column for c in self.cells if c.is_caught]
        derived = "caught" if self.expected in caught else "caught_elsewhere" if caught else "missed"
        if self.verdict not in ("skipped", "broken", derived):
            raise ValueError(f"{self.name}: the cells say {derived}, the verdict {self.verdict}")
        if self.verdict in ("skipped", "broken") and not self.reason:
            raise ValueError(f"{self.name}: {self.verdict} needs its reason")
        return self


class FaultScore(Record):
    """One run of the fault suite: the harness's own score."""

    schema_version: Literal[1] = 1
    harness_version: str
    harness_digest: Digest
    """The harness that this is the score of."""
    pack: str
    pack_digest: Digest
    """The pack that the faults were planted in."""
    tier: Tier
    seed: Whole
    created: AwareDatetime
    cpu_model: str
    gpus: tuple[str, ...] = ()
    results: tuple[FaultResult, ...] = Field(min_length=1)

    @property
    def planted(self) -> tuple[FaultResult, ...]:
        """Faults that could run at this tier."""
        return tuple(r for r in self.results if r.verdict != "skipped")

    @property
    def caught(self) -> tuple[FaultResult, ...]:
        """Faults that some check objected to and whose twin it passed."""
        return tuple(r for r in self.results if r.verdict in ("caught", "caught_elsewhere"))

    @property
    def deterministic_false_alarms(self) -> tuple[Sighting, ...]:
        """Accusations of repaired twins by checks that noise cannot move: there must be none."""
        return tuple(s for r in self.results for s in r.false_alarms if not s.is_statistical)

    @property
    def statistical_false_alarms(self) -> tuple[Sighting, ...]:
        """Accusations of repaired twins by checks that noise can move."""
        return tuple(s for r in self.results for s in r.false_alarms if s.is_statistical)

    @property
    def is_as_expected(self) -> bool:
        """Whether every miss names its gap, nothing broke, and no deterministic check accused a twin."""
        surprises = [
            r for r in self.results if r.verdict == "broken" or (r.verdict == "missed" and not r.reason)
        ]
        return not surprises and not self.deterministic_false_alarms

    def words(self) -> str:
        """One sentence: how many were planted, caught, missed, and falsely accused."""
        skipped = len(self.results) - len(self.planted)
        elsewhere = sum(r.verdict == "caught_elsewhere" for r in self.results)
        return (
            f"{len(self.caught)} of {len(self.planted)} planted faults caught at tier {self.tier} "
            f"({elsewhere} by another stage than expected), {skipped} skipped for want of a GPU; repaired "
            f"twins: {len(self.deterministic_false_alarms)} false alarms from deterministic checks, "
            f"{len(self.statistical_false_alarms)} from statistical ones"
        )


class AlarmRun(Record):
    """What the statistical checks said of an honest pack with one seed."""

    schema_version: Literal[1] = 1
    seed: Whole
    harness_digest: Digest
    pack: str
    pack_digest: Digest
    created: AwareDatetime
    cpu_model: str
    seen: tuple[Sighting, ...] = Field(min_length=1)

    @property
    def alarms(self) -> tuple[Sighting, ...]:
        """Accusations: the pack is honest, so each is false."""
        return tuple(s for s in self.seen if s.is_alarm)
