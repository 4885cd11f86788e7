"""Which modules of a tree import which, from text alone: nothing of the tree is imported or run.

Invariant: an edge is an import statement, at any depth and also in a function, or a string that is the dotted
name of a module of the tree, which is how registries name what they load. The text is scanned for statements
rather than parsed, as a tree has thousands of files and a hostile one may hold anything: a statement in a
docstring counts too, so that reach is over- and never under-stated. A name that is computed gives no edge.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Final

from grimp import ImportGraph

from harness.stages.isolation.names import absolute_name, package_of
from harness.stages.isolation.zones import PYTHON_ROOTS, ZoneIndex

__all__ = ["MAX_MODULES", "ModuleGraph", "module_of", "named_modules", "package_roots", "read_names"]

MAX_MODULES: Final = 20_000
MAX_SCANNED: Final = 2 * 2**20
_CHANGED: Final = "<changed>"
_STARTS: Final = "<starts>"
_STATEMENT: Final = re.compile(
    r"(?:from[ \t]+(?P<origin>\.*[\w.]*)[ \t]+import[ \t]*"
    r"(?P<names>\([^)]{0,20000}\)|(?:[^\n;#(\\]|\\\r?\n)+))"
    r"|(?:import[ \t]+(?P<modules>(?:[^\n;#\\]|\\\r?\n)+))"
)
_COMMENT: Final = re.compile(r"#[^\n]*|[()\\]")
_QUOTED: Final = re.compile(r"""["']([A-Za-z_]\w*(?:\.\w+)+)(?:[:.][\w.]*)?["']""")


@lru_cache(maxsize=2 * MAX_MODULES)
def module_of(path: str) -> str:
    """Name of a Python file in the graph: its path with dots, without the folder of the import path."""
    stem = path.removesuffix(".py").removesuffix("/__init__")
    root = next((root for root in PYTHON_ROOTS if root and stem.startswith(root)), "")
    return stem.removeprefix(root).replace("/", ".")


def named_modules(
    path: str, text: str, roots: frozenset[str], packages: frozenset[str] | None = None
) -> frozenset[str]:
    """Dotted names that a file imports, of `roots`, or holds as a string, of `packages`."""
    if len(text) > MAX_SCANNED:
        return frozenset()
    package = package_of(path)
    found = set(_imported(text, package))
    if any(f'"{name}.' in text or f"'{name}." in text for name in (roots if packages is None else packages)):
        found.update(_QUOTED.findall(text))
    return frozenset(name for name in found if name.partition(".")[0] in roots)


class ModuleGraph:
    """The modules of one side of a change."""

    def __init__(self, zones: ZoneIndex, names: Mapping[str, frozenset[str]]) -> None:
        """`names` holds the dotted names that each Python file of the side asks for, by path."""
        self._graph = ImportGraph()
        self._paths = {module_of(path): path for path in names}
        for module in self._paths:
            self._graph.add_module(module)
        for path, asked in names.items():
            importer = module_of(path)
            targets = {zones.file_of_module(name) for name in asked} - {None, path}
            for target in targets:
                if target is not None and target in names:
                    self._graph.add_import(importer=importer, imported=module_of(target))

    def reaching(self, changed: frozenset[str]) -> frozenset[str]:
        """Paths of modules that import a changed one, directly or not, without the changed ones."""
        modules = self._join(changed)
        found = self._graph.find_downstream_modules(_CHANGED)
        self._graph.remove_module(_CHANGED)
        return frozenset(self._paths[name] for name in found - modules)

    def reached_from(self, starts: frozenset[str]) -> frozenset[str]:
        """Paths of modules that any of `starts` imports, directly or not."""
        modules = {module_of(path) for path in starts} & self._paths.keys()
        self._graph.add_module(_STARTS)
        for module in modules:
            self._graph.add_import(importer=_STARTS, imported=module)
        found = self._graph.find_upstream_modules(_STARTS)
        self._graph.remove_module(_STARTS)
        return frozenset(self._paths[name] for name in found)

    def importers(self, path: str) -> frozenset[str]:
        """Paths that import a file themselves, or through a package that imports it."""
        module = module_of(path)
        if module not in self._paths:
            return frozenset()
        direct = self._graph.find_modules_that_directly_import(module)
        packages = {name for name in direct if self._paths[name].endswith("/__init__.py")}
        through = {n for package in packages for n in self._graph.find_modules_that_directly_import(package)}
        return frozenset(self._paths[name] for name in direct | through)

    def chain(self, importer: str, changed: frozenset[str]) -> tuple[str, ...]:
        """The shortest way from a module to a changed one, as module names."""
        self._join(changed)
        found = self._graph.find_shortest_chain(importer=module_of(importer), imported=_CHANGED) or ()
        self._graph.remove_module(_CHANGED)
        return tuple(found[:-1])

    def _join(self, changed: frozenset[str]) -> set[str]:
        """The changed modules, made to import one module that stands for all of them."""
        modules = {module_of(path) for path in changed} & self._paths.keys()
        self._graph.add_module(_CHANGED)
        for module in modules:
            self._graph.add_import(importer=module, imported=_CHANGED)
        return modules


def package_roots(paths: tuple[str, ...]) -> frozenset[str]:
    """First parts of every name under which a file of the tree could be imported."""
    return frozenset(name.partition(".")[0] for path in paths for name in (module_of(path), package_of(path)))


def read_names(
    paths: tuple[str, ...], read: Callable[[str], str | None], roots: frozenset[str]
) -> dict[str, frozenset[str]]:
    """What every Python file of a side asks for; files that cannot be read ask for nothing."""
    known = frozenset(paths)
    packages = frozenset(r for r in roots if any(f"{f}{r}/__init__.py" in known for f in PYTHON_ROOTS)) - {
        "tests"
    }
    return {path: named_modules(path, read(path) or "", roots, packages or None) for path in paths}


def _imported(text: str, package: str) -> Iterator[str]:
    """Dotted names of every import statement; `from a import b` gives `a` and `a.b`."""
    end = text.find("import")
    while end >= 0:
        line = text.rfind("\n", 0, end) + 1
        start = max(line, end - 300)
        place = text.rfind("from", start, end)
        statement = _STATEMENT.match(text, place) if place >= 0 else None
        if statement is None or statement["origin"] is None:
            statement = _STATEMENT.match(text, end)
        if statement is not None:
            yield from _names_of(statement, package)
        end = text.find("import", max(end + 6, statement.end() if statement is not None else 0))


def _names_of(statement: re.Match[str], package: str) -> Iterator[str]:
    if statement["origin"] is None:
        yield from _listed(statement["modules"])
        return
    origin = absolute_name(statement["origin"], package)
    yield origin
    yield from (f"{origin}.{name}" for name in _listed(statement["names"]) if name != "*")


def _listed(text: str) -> Iterator[str]:
    """The first word of each part between commas: what is imported, whatever it is called after `as`."""
    for part in _COMMENT.sub(" ", text).split(","):
        words = part.split(None, 1)
        if words:
            yield words[0]
