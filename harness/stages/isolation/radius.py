"""How far a change reaches: who can import it now, what of it tests import, and what callers must notice.

Everything here is shown and fails nothing by itself; rules of the blast_radius family do that.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from harness.domain.change import SourceTree
from harness.domain.errors import InputError
from harness.domain.policy import ZoneMap
from harness.stages.isolation.detectors.definitions import Altered
from harness.stages.isolation.import_graph import (
    MAX_MODULES,
    ModuleGraph,
    package_roots,
    read_names,
)
from harness.stages.isolation.named_lines import count_named_lines, words_of
from harness.stages.isolation.source import Source
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["Exercised", "Named", "Newly", "Radius", "ZoneReach", "measure_radius"]

MAX_NEWLY: Final = 300
UNTESTED_ZONES: Final = ("tests", "docs")


class ZoneReach(NamedTuple):
    """Modules of one zone that can import a changed module, directly or not."""

    zone: str
    modules: int
    before: int
    after: int


class Newly(NamedTuple):
    """A module that could not reach any changed module at base."""

    path: str
    zone: str
    chain: str


class Exercised(NamedTuple):
    """A changed file of code, and the tests whose imports lead to it."""

    path: str
    added_lines: int
    direct_tests: int
    """Test files that import it, or a package whose `__init__` does."""
    is_reached: bool
    """Whether any test file imports it, directly or not."""


class Named(NamedTuple):
    """A changed file of code, and its added lines in what the tests that import it name."""

    path: str
    named_lines: int


class Radius(NamedTuple):
    """What is known of a change's reach."""

    zones: tuple[ZoneReach, ...]
    newly: tuple[Newly, ...]
    exercised: tuple[Exercised, ...]
    altered: tuple[Altered, ...]
    missing: str
    """Why there is no import graph; empty where there is one."""
    named: tuple[Named, ...] = ()


def measure_radius(
    judged: Sequence[Source],
    altered: tuple[Altered, ...],
    tree: SourceTree,
    zones: ZoneMap,
    head_zones: ZoneIndex,
) -> Radius:
    """The reach of the judged files' changes; only Python files are in the graph."""
    code = [s for s in judged if s.zone not in UNTESTED_ZONES and s.after is not None and s.added]
    changed = [s for s in judged if s.language == "python" and s.zone not in UNTESTED_ZONES]
    sides = {side: tuple(p for p in tree.paths(side) if p.endswith(".py")) for side in ("base", "head")}
    if not changed or max(map(len, sides.values())) > MAX_MODULES:
        missing = f"the tree has over {MAX_MODULES} modules" if changed else "no Python code changed"
        return Radius((), (), (), altered, missing)
    names = _names(tree, sides["head"], package_roots(sides["head"] + sides["base"]))
    base_zones = ZoneIndex(zones, frozenset(tree.paths("base")))
    before_names = {p: names[p] for p in sides["base"] if p in names}
    before_names |= _base_names(tree, sides, judged)
    after, before = ModuleGraph(head_zones, names), ModuleGraph(base_zones, before_names)
    targets = frozenset(path for s in changed for path in (s.path, s.file.old_path) if path is not None)
    reach_after, reach_before = after.reaching(targets), before.reaching(targets)
    return Radius(
        tuple(_by_zone(head_zones, sides["head"], reach_before, reach_after)),
        tuple(_newly(after, head_zones, sorted(reach_after - reach_before - targets), targets)),
        tuple(_exercised(after, head_zones, names, code)),
        altered,
        "",
        tuple(_named(after, head_zones, code, tree)),
    )


def _names(tree: SourceTree, paths: tuple[str, ...], roots: frozenset[str]) -> dict[str, frozenset[str]]:
    return read_names(paths, lambda path: _text(tree, "head", path), roots)


def _base_names(
    tree: SourceTree, sides: Mapping[str, tuple[str, ...]], judged: Sequence[Source]
) -> dict[str, frozenset[str]]:
    """What files that the change touches asked for at base; all others ask for the same at both sides."""
    listed, roots = frozenset(sides["base"]), package_roots(sides["base"])
    old = {s.file.old_path or s.path: s.before for s in judged if s.before is not None}
    gone = tuple(sorted((listed - frozenset(sides["head"]) | old.keys()) & listed))
    return read_names(gone, lambda path: old.get(path) or _text(tree, "base", path), roots)


def _by_zone(
    zones: ZoneIndex, paths: tuple[str, ...], before: frozenset[str], after: frozenset[str]
) -> list[ZoneReach]:
    total = Counter(zones.zone_of(path) for path in paths)
    old, new = (Counter(zones.zone_of(path) for path in side) for side in (before, after))
    return [ZoneReach(zone, total[zone], old[zone], new[zone]) for zone in sorted(total | old | new)]


def _newly(
    graph: ModuleGraph, zones: ZoneIndex, paths: Sequence[str], targets: frozenset[str]
) -> list[Newly]:
    """Modules with a new way to the change; shared ones first, as they are what deployments run."""
    ranked = sorted(paths, key=lambda path: (zones.zone_of(path) in ("tests", "model_code"), path))
    return [
        Newly(path, zones.zone_of(path), " > ".join(graph.chain(path, targets))[:600])
        for path in ranked[:MAX_NEWLY]
    ]


def _exercised(
    graph: ModuleGraph, zones: ZoneIndex, names: Mapping[str, frozenset[str]], code: Sequence[Source]
) -> list[Exercised]:
    tests = frozenset(path for path in names if zones.zone_of(path) == "tests")
    reached = graph.reached_from(tests)
    return [
        Exercised(
            source.path,
            len(source.added),
            len(graph.importers(source.path) & tests),
            source.path in reached,
        )
        for source in code
        if source.language == "python"
    ]


def _named(graph: ModuleGraph, zones: ZoneIndex, code: Sequence[Source], tree: SourceTree) -> Iterator[Named]:
    """Each test file is read once, however many changed files it imports."""
    words: dict[str, frozenset[str]] = {}
    for source in (s for s in code if s.language == "python"):
        tests = [path for path in graph.importers(source.path) if zones.zone_of(path) == "tests"]
        for path in tests:
            if path not in words:
                words[path] = words_of(_text(tree, "head", path) or "")
        named = frozenset[str]().union(*(words[path] for path in tests))
        yield Named(source.path, count_named_lines(source, named))


def _text(tree: SourceTree, side: str, path: str) -> str | None:
    try:
        content = tree.read("base" if side == "base" else "head", path)
    except InputError:
        return None
    return content.decode("utf-8", "replace") if content is not None else None
