"""Which zone a path lies in.

Invariant: every path has exactly one zone; the first of the map whose globs match it, else `unknown`.
"""

from functools import cached_property
from typing import Final

from pathspec import GitIgnoreSpec

from harness.domain.policy import ZoneMap, ZoneName

__all__ = ["PYTHON_ROOTS", "ZoneIndex"]

PYTHON_ROOTS: Final = ("", "kernels/", "src/", "python/")
"""Folders that may be on the import path of a repository, tried in order."""


class ZoneIndex:
    """Zones of one tree, with its modules resolved to files."""

    def __init__(self, zones: ZoneMap, paths: frozenset[str]) -> None:
        self.name = zones.name
        self._zones = [(zone.name, GitIgnoreSpec.from_lines(zone.globs)) for zone in zones.zones]
        self._paths = paths
        self._known: dict[str, ZoneName] = {}
        self._modules: dict[str, str | None] = {}

    def zone_of(self, path: str) -> ZoneName:
        """Zone of a repository path."""
        if path not in self._known:
            matching = (name for name, globs in self._zones if globs.match_file(path))
            self._known[path] = next(matching, "unknown")
        return self._known[path]

    def file_of_module(self, dotted: str) -> str | None:
        """Path of the module that `dotted` is, or lies in; None for one from outside the repository."""
        if dotted not in self._modules:
            self._modules[dotted] = self._find(dotted)
        return self._modules[dotted]

    def zone_of_module(self, dotted: str) -> ZoneName | None:
        """Zone of a module; None for one from outside the repository."""
        path = self.file_of_module(dotted)
        if path is not None:
            return self.zone_of(path)
        return None

    def _find(self, dotted: str) -> str | None:
        parts = dotted.split(".")
        roots = [root for root in PYTHON_ROOTS if f"{root}{parts[0]}" in self._folders or not root]
        while parts:
            stem = "/".join(parts)
            for root in roots:
                for path in (f"{root}{stem}.py", f"{root}{stem}/__init__.py"):
                    if path in self._paths:
                        return path
            parts.pop()
        return None

    @cached_property
    def _folders(self) -> frozenset[str]:
        return frozenset("/".join(path.split("/")[:2]) for path in self._paths if "/" in path)
