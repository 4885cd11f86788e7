"""Every fault that is installed here, whoever wrote it.

A suite is a zero-argument function under the entry-point group `fasttrack.faults` that gives its faults; the
repository's own suite is one of them. Invariant: names are unique over all suites.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from harness.domain.errors import InputError
from harness.engines.packs import entry_points_of
from harness.faults.fault import Fault

__all__ = ["GROUP", "Registered", "registered_faults"]

GROUP = "fasttrack.faults"


@dataclass(frozen=True, slots=True)
class Registered:
    """A fault and the suite that it comes from."""

    suite: str
    fault: Fault


def registered_faults() -> tuple[Registered, ...]:
    """Faults of all suites, by suite and name; raises `InputError` for one that does not load, or a clash."""
    found: list[Registered] = []
    for entry in entry_points_of(GROUP):
        try:
            suite = cast("Callable[[], Iterable[Fault]]", entry.load())
        except ImportError as error:
            raise InputError(
                f"fault suite {entry.name!r} does not load from {entry.value}: {error}; the repository's own "
                "suite needs a checkout (`pip install -e .`), another one the package that registers it"
            ) from error
        found += sorted((Registered(entry.name, fault) for fault in suite()), key=lambda r: r.fault.name)
    twice = [name for name, count in Counter(r.fault.name for r in found).items() if count > 1]
    if twice:
        raise InputError(f"two faults are called {', '.join(sorted(twice))}; rename one of each")
    if not found:
        raise InputError(f"no fault suite is installed under the entry-point group {GROUP!r}")
    return tuple(found)
