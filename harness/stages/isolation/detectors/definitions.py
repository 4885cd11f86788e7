"""What a Python module or C++ header defines, compared between base and head: signatures and defaults."""

from collections.abc import Iterator
from typing import NamedTuple

from harness.domain.policy import Rule
from harness.stages.isolation.detectors.cpp_definitions import Accepting, Overloads, cpp_functions
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["Altered", "altered_functions", "find_default_changed", "find_signature_changed"]


HEADERS = (".h", ".hpp", ".cuh", ".inl")
"""What other files include; a function of another C++ file is met through a declaration in one of these."""


class Definition(NamedTuple):
    """A function with its parameters as they are written, or a field with its default."""

    line: int
    parameters: tuple[tuple[str, str | None], ...]
    """(name, default); a field has one of its own name."""


class Altered(NamedTuple):
    """A public function that callers meet differently now."""

    path: str
    line: int | None
    name: str
    what: str


def altered_functions(source: Source) -> Iterator[Altered]:
    """Public functions and fields of any zone whose signature or default changed."""
    if _is_header(source):
        for name, line, what in (*_cpp_broken(source), *_cpp_extended(source), *_cpp_defaults(source)):
            yield Altered(source.path, line, name, what)
    elif source.language == "python" and source.file.status in ("modified", "renamed"):
        old, new = _functions(source.old_root), _functions(source.root)
        for name, before in old.items():
            if _is_private(name):
                continue
            after = new.get(name)
            if after is None:
                yield Altered(source.path, None, name, "is gone")
            elif before.parameters != after.parameters:
                is_fit = _accepts(after.parameters, before.parameters)
                words = "takes more than before" if is_fit else "breaks calls that fitted"
                yield Altered(source.path, after.line, name, words)
        fields = _defaults(source.root)
        for name, (_, value) in _defaults(source.old_root).items():
            line, now = fields.get(name, (0, value))
            if now != value and not _is_private(name.partition("(")[0]):
                yield Altered(source.path, line, name, f"default {_short(value)} became {_short(now)}")


def find_signature_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Public functions that are gone or whose parameters were removed, reordered or newly required."""
    if _is_header(source):
        for name, line, _ in _cpp_broken(source):
            said = f"{name} is gone" if line is None else f"callers of {name} may break"
            yield Match(line, name if line is None else source.lines[line - 1].strip(), said)
    if source.language != "python" or source.file.status not in ("modified", "renamed"):
        return
    old, new = _functions(source.old_root), _functions(source.root)
    for name, before in old.items():
        if _is_private(name):
            continue
        after = new.get(name)
        if after is None:
            yield Match(None, name, f"{name} is gone")
        elif not _accepts(after.parameters, before.parameters):
            yield Match(after.line, source.lines[after.line - 1].strip(), f"callers of {name} may break")


def find_default_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Defaults of fields and parameters that have another value at head."""
    if _is_header(source):
        for name, line, what in _cpp_defaults(source):
            if (at := source.first_added(line, line + 20)) is not None:
                yield Match(at, source.lines[at - 1].strip(), f"{name}: {what}")
    if source.language != "python" or source.file.status not in ("modified", "renamed"):
        return
    old, new = _defaults(source.old_root), _defaults(source.root)
    for name, (_, before) in old.items():
        line, after = new.get(name, (0, before))
        if before != after and (at := source.first_added(line, line + after.count("\n"))) is not None:
            yield Match(at, source.lines[at - 1].strip(), f"{name}: {_short(before)} became {_short(after)}")


def _is_header(source: Source) -> bool:
    is_kept = source.file.status in ("modified", "renamed")
    return is_kept and source.language in ("cpp", "cuda") and source.path.endswith(HEADERS)


def _both_sides(source: Source) -> tuple[Overloads, Overloads, dict[str, Accepting]]:
    """What a header declared, what it declares now, and what calls that fits, by name."""

    def made(s: Source) -> tuple[Overloads, Overloads, dict[str, Accepting]]:
        new = cpp_functions(s.root)
        return cpp_functions(s.old_root), new, {name: Accepting(left) for name, left in new.items()}

    return source.derive("cpp_functions", made)


def _cpp_broken(source: Source) -> Iterator[tuple[str, int | None, str]]:
    """(name, line, words) of functions that some call fitted and fits no longer."""
    old, new, fits = _both_sides(source)
    for name, overloads in old.items():
        if name not in new:
            yield name, None, "is gone"
        elif not all(map(fits[name].accepts, overloads)):
            yield name, new[name][0].line, "breaks calls that fitted"


def _cpp_extended(source: Source) -> Iterator[tuple[str, int | None, str]]:
    old, new, fits = _both_sides(source)
    for name, overloads in old.items():
        is_fit = name in new and all(map(fits[name].accepts, overloads))
        if is_fit and {f.types for f in new[name]} != {f.types for f in overloads}:
            yield name, new[name][0].line, "takes more than before"


def _cpp_defaults(source: Source) -> Iterator[tuple[str, int, str]]:
    """(name, line, words) of parameters whose default has another value."""
    old, _, fits = _both_sides(source)
    for name, overloads in old.items():
        for function in overloads:
            same = fits[name].first(function.types) if name in fits else None
            for before, after in zip(function.defaults, same.defaults if same else (), strict=False):
                if same is not None and before is not None and after is not None and before != after:
                    yield name, same.line, f"default {_short(before)} became {_short(after)}"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__init__" for part in name.split("."))


def _functions(root: Node | None) -> dict[str, Definition]:
    """Module functions and methods by qualified name."""
    found: dict[str, Definition] = {}
    for node in root.find_all(kind="function_definition") if root is not None else ():
        name = _qualified(node)
        if name is not None:
            found[name] = Definition(node.field("name").range().start.line + 1, tuple(_parameters(node)))
    return found


def _parameters(function: Node) -> Iterator[tuple[str, str | None]]:
    for child in function.field("parameters").named_children():
        if child.kind() in ("default_parameter", "typed_default_parameter"):
            yield child.field("name").text(), child.field("value").text()
        elif child.kind() == "typed_parameter":
            yield child.child(0).text(), None
        elif child.kind() != "comment":
            yield child.text(), None


def _defaults(root: Node | None) -> dict[str, tuple[int, str]]:
    """(line, default) by qualified name of fields and parameters."""
    found: dict[str, tuple[int, str]] = {}
    for node in root.find_all(kind="function_definition") if root is not None else ():
        if (name := _qualified(node)) is None:
            continue
        for child in node.field("parameters").named_children():
            if child.kind() in ("default_parameter", "typed_default_parameter"):
                value = child.field("value")
                found[f"{name}({child.field('name').text()})"] = (value.range().start.line + 1, value.text())
    for cls in root.find_all(kind="class_definition") if root is not None else ():
        for statement in cls.field("body").named_children():
            inner = statement.child(0) if statement.kind() == "expression_statement" else None
            if inner is not None and inner.kind() == "assignment" and inner.field("right") is not None:
                value = inner.field("right")
                key = f"{cls.field('name').text()}.{inner.field('left').text()}"
                found[key] = (value.range().start.line + 1, value.text())
    return found


def _qualified(function: Node) -> str | None:
    """`f` or `Class.f`; None for a function inside another."""
    name = str(function.field("name").text())
    for above in function.ancestors():
        if above.kind() == "function_definition":
            return None
        if above.kind() == "class_definition":
            name = f"{above.field('name').text()}.{name}"
    return name


def _accepts(after: tuple[tuple[str, str | None], ...], before: tuple[tuple[str, str | None], ...]) -> bool:
    """Whether every call that fitted `before` fits `after`: same order, nothing newly required."""
    kept = [name for name, _ in after]
    names = [name for name, _ in before]
    if [name for name in kept if name in names] != names:
        return False
    old = dict(before)
    return all(
        default is not None or name in old or name.startswith("*") or name == "/" for name, default in after
    ) and all(default is None or dict(after)[name] is not None for name, default in before)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
