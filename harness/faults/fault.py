"""What a fault is: a small patch with a repaired twin, the report it stands for and who must notice.

A scene plants one of the two and lets real stages look at it. The kinds of scene in `scenes` cover ops,
dispatchers and engines (patched in this process), changes (files of a commit), samples and bundles; a
stranger's suite may bring its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from harness.domain.faults import FaultColumn, FaultTarget, Sighting
from harness.domain.machine import Tier

if TYPE_CHECKING:
    from harness.faults.bench import Bench

__all__ = ["Fault", "Scene"]


class Scene(Protocol):
    """Plants a fault, or its repaired twin, and gives what the stages said."""

    def look(self, bench: "Bench", is_repaired: bool) -> Iterable[Sighting]:
        """Sightings in the order in which they were made; everything planted is gone when it returns."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault. A suite keeps one in each file, and the file has the fault's name."""

    name: str
    title: str
    """What is wrong, in one sentence."""
    report: str
    """Public report of this kind of fault, such as `vllm-project/vllm#41623`."""
    target: FaultTarget
    expected: FaultColumn
    """Where it must be noticed."""
    scene: Scene
    tier: Tier = Tier.SMOKE
    """Cheapest tier at which it can be noticed; a stronger one than the run's makes it skipped."""
    gap: str = ""
    """Why the harness is known to miss it, where it does: counted as missed, and expected to be."""
