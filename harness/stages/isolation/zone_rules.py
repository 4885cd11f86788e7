"""The zones family: which files a claim's change may touch, and that the map knows every file."""

import posixpath
from collections.abc import Iterator
from typing import Final

from harness.domain.check import Finding, Severity
from harness.domain.policy import ZoneName
from harness.stages.isolation.examples import Trial
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["BREACH", "UNKNOWN", "check_zones", "try_zones"]

UNKNOWN: Final = "unknown_zone"
BREACH: Final = "zone_breach"
PLANTED_UNKNOWN: Final = "fasttrack-planted/no-zone-has-this.planted"


def check_zones(
    path: str, old_path: str | None, zones: ZoneIndex, allowed: tuple[ZoneName, ...] | None
) -> Iterator[Finding]:
    """Findings about one changed path; `allowed` is None where its zone is not judged."""
    for place in (path, old_path):
        if place is None:
            continue
        zone = zones.zone_of(place)
        if zone == "unknown":
            yield Finding(
                rule=UNKNOWN,
                severity=Severity.ERROR,
                message=f"no zone of map {zones.name} covers this path, so nobody has said who reviews it",
                path=place,
                remedy=(
                    f"move the file into a folder that has a zone, or ask the gatekeepers for a line in "
                    f"policies/zones/{zones.name}.yaml: {_glob_for(place)} under the globs of the zone whose "
                    "owners shall review it; another tree than this map's needs a policy with its own map"
                ),
            )
        elif allowed is not None and zone not in allowed:
            yield Finding(
                rule=BREACH,
                severity=Severity.ERROR,
                message=f"{place} lies in {zone}, which a claim's change may not touch",
                path=place,
                remedy=(
                    f"take the file out of this change and send it to the owners of {zone}, or ask the "
                    "gatekeepers for a waiver"
                ),
            )


def try_zones(zones: ZoneIndex, paths: tuple[str, ...], allowed: tuple[ZoneName, ...]) -> Iterator[Trial]:
    """Planted paths through the same check: an unknown one, and one file of each zone that folders show."""
    yield _trial(UNKNOWN, PLANTED_UNKNOWN, zones, allowed, expected=True)
    seen: set[ZoneName] = set()
    for path in {posixpath.dirname(path): path for path in reversed(paths)}.values():
        zone = zones.zone_of(path)
        if zone not in seen and zone != "unknown":
            seen.add(zone)
            yield _trial(BREACH, path, zones, allowed, expected=zone not in allowed)


def _glob_for(path: str) -> str:
    """The pattern that covers a path's folder, or the file itself where it lies at the root."""
    folder = posixpath.dirname(path)
    return f"/{folder}/**" if folder else f"/{path}"


def _trial(rule: str, path: str, zones: ZoneIndex, allowed: tuple[ZoneName, ...], expected: bool) -> Trial:
    found = any(finding.rule == rule for finding in check_zones(path, None, zones, allowed))
    return Trial(rule, path[:200], expected, found, None, None)
