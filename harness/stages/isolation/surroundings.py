"""What a detector may ask beside the file it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harness.domain.claim import Switch
from harness.domain.policy import ZoneName
from harness.stages.isolation.source import Source
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["Match", "Surroundings"]


@dataclass(frozen=True, slots=True)
class Match:
    """One place where a rule applies."""

    line: int | None
    excerpt: str
    note: str = ""
    """What exactly was found, where the excerpt does not say it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The change and the tree around one file."""

    zones: ZoneIndex
    changed_zones: frozenset[ZoneName]
    sources: Mapping[str, Source]
    """Every changed file by path."""
    read_head: Callable[[str], bytes | None]
    switch: Switch | None
    max_file_bytes: int
    functions: frozenset[str] = frozenset()
    """Names of every function that a changed Python file defines at head."""
    private_methods: dict[str, set[str]] = field(default_factory=dict)
    """By dotted name of a shared class, filled as rules ask."""
