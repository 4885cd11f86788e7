"""Figures that others published, with their conditions, and which of them may be put side by side.

Two figures give a ratio of software where they differ in the path alone. Tokens per second under a synthetic
acceptance are verify steps times an assumption: `verify_steps_per_s` takes it out, and `at_acceptance` says
what another acceptance would give, which is derived and not measured.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from pydantic import Field, ValidationError

from harness.domain.check import Status
from harness.domain.errors import InputError
from harness.domain.record import Name, Positive, Record, Whole

__all__ = [
    "PublishedFigure", "PublishedSet", "SideBySide", "TableRow", "at_acceptance", "load_published",
    "put_side_by_side", "verify_steps_per_s",
]  # fmt: skip


class PublishedFigure(Record):
    """Tokens a second, and everything that it depends on."""

    name: Name
    value: float = Field(gt=0)
    source: Name
    gpu: str
    gpus: Positive
    path: Literal["stock", "specialised"]
    batch: Positive = 1
    drafts: Whole = 0
    acceptance: Literal["none", "measured", "golden", "synthetic"] = "none"
    acceptance_length: float | None = Field(default=None, ge=1)
    traffic: Literal["decode", "agentx"] = "decode"


class TableRow(NamedTuple):
    """One batch of the published table."""

    batch: int
    tp8_tokens_per_s: float
    tp8_speedup: float
    tp16_tokens_per_s: float
    tp16_speedup: float


class PublishedTable(Record):
    """Throughput without speculation by batch and parallelism."""

    source: Name
    gpu: str
    rows: tuple[TableRow, ...] = Field(min_length=1)


class PublishedSet(Record):
    """One file under `sweeps/published`."""

    schema_version: Literal[1] = 1
    name: Name
    sources: dict[str, str]
    golden: tuple[tuple[int, float], ...]
    """(drafts, tokens a verify step)."""
    figures: tuple[PublishedFigure, ...]
    table: PublishedTable

    def figure(self, name: str) -> PublishedFigure:
        """By name; raises `KeyError`."""
        return {figure.name: figure for figure in self.figures}[name]

    def golden_length(self, drafts: int) -> float:
        """Golden tokens a verify step; raises `KeyError` for drafts that have none."""
        return dict(self.golden)[drafts]


class SideBySide(Record):
    """Whether two figures may be compared."""

    status: Status
    """PASS, or INVALID."""
    ratio: float | None
    words: str


def load_published(path: Path) -> PublishedSet:
    """A set from YAML; raises `InputError` naming the file and the first wrong field."""
    try:
        return PublishedSet.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise InputError(
            f"{path}: no published figures can be read here: {str(error).splitlines()[0]}"
        ) from error


def put_side_by_side(one: PublishedFigure, two: PublishedFigure) -> SideBySide:
    """The ratio of the first over the second where they differ in the path alone; INVALID otherwise."""
    differing = [
        f"{name.replace('_', ' ')} {getattr(one, name)} against {getattr(two, name)}"
        for name in ("gpu", "gpus", "batch", "drafts", "acceptance", "acceptance_length", "traffic")
        if getattr(one, name) != getattr(two, name)
    ]
    if differing:
        return SideBySide(status=Status.INVALID, ratio=None, words="; ".join(differing))
    return SideBySide(status=Status.PASS, ratio=one.value / two.value, words="differ in the path alone")


def verify_steps_per_s(figure: PublishedFigure) -> float | None:
    """Steps a second; None where the acceptance length was not published."""
    length = 1.0 if figure.acceptance == "none" else figure.acceptance_length
    return None if length is None else figure.value / length


def at_acceptance(figure: PublishedFigure, length: float) -> float | None:
    """Tokens a second that the same steps would give at another acceptance length: derived, not measured."""
    steps = verify_steps_per_s(figure)
    return None if steps is None else steps * length
