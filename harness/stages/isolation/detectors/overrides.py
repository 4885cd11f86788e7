"""Methods with a private name that a shared base class has too, however the class is made."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from ast_grep_py import SgRoot

from harness.domain.policy import Rule
from harness.stages.isolation.flow import Flow, Scope, flow_of
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_private_override"]


class _Class(NamedTuple):
    """A class of the file: what it is made from, and its methods with their lines."""

    bases: frozenset[str]
    methods: tuple[tuple[str, int], ...]


def find_private_override(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Methods with a private name that a base class of shared code also has; the rule's patterns, where it
    has any, say of which classes.
    """
    for cls in source.derive("classes", lambda s: tuple(_classes(flow_of(s)))):
        inherited: set[str] = set()
        for base in cls.bases:
            if not rule.patterns or any(re.search(pattern, base) for pattern in rule.patterns):
                inherited |= _private_methods(base, around)
        for name, line in cls.methods:
            if name in inherited and line in source.added:
                text = source.lines[line - 1].strip()
                yield Match(line, text, f"{name} is private to a shared base class")


def _classes(flow: Flow | None) -> Iterator[_Class]:
    for node, scope in flow.statements if flow is not None else ():
        assert flow is not None
        if isinstance(node, ast.Assign):
            yield from _assigned(node, flow, scope)
        elif isinstance(node, ast.ClassDef):
            bases = frozenset(name for base in node.bases for name in flow.names(base, scope))
            yield _Class(bases, tuple(_methods_of(node)))
            if bases:
                for part in _parts_of(node, flow, scope):
                    yield _Class(bases, tuple(_methods_of(part)))
        elif isinstance(node, ast.Call) and len(node.args) == 3 and _is_new_class(node, flow, scope):
            bases = frozenset(o.dotted for o in flow.origins(node.args[1], scope) if o.kind == "import")
            yield _Class(bases, tuple(_methods_in(node)))


def _assigned(node: ast.Assign, flow: Flow, scope: Scope) -> Iterator[_Class]:
    """A method that is put on a class of the file's own after it was made."""
    for target in node.targets:
        if isinstance(target, ast.Attribute):
            for cls in flow.definitions(target.value, scope):
                if isinstance(cls, ast.ClassDef):
                    bases = frozenset(name for base in cls.bases for name in flow.names(base, scope))
                    yield _Class(bases, ((target.attr, node.lineno),))


def _parts_of(node: ast.ClassDef, flow: Flow, scope: Scope) -> Iterator[ast.ClassDef]:
    """Classes of the file's own that a class stands on beside shared ones."""
    waiting, seen = [node], {node}
    while waiting:
        for base in waiting.pop().bases:
            for part in flow.definitions(base, scope):
                if isinstance(part, ast.ClassDef) and part not in seen:
                    seen.add(part)
                    waiting.append(part)
                    yield part


def _is_new_class(node: ast.Call, flow: Flow, scope: Scope) -> bool:
    return not flow.names(node.func, scope).isdisjoint(
        ("builtins.type", "types.new_class", "builtins.type.__new__")
    )


def _methods_of(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name, part.lineno
        elif isinstance(part, ast.Assign):
            yield from ((t.id, part.lineno) for t in part.targets if isinstance(t, ast.Name))


def _methods_in(call: ast.Call) -> Iterator[tuple[str, int]]:
    for part in ast.walk(call.args[2]):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value, part.lineno
        elif isinstance(part, ast.keyword) and part.arg is not None:
            yield part.arg, part.value.lineno


def _private_methods(dotted: str, around: Surroundings) -> set[str]:
    """Private methods of a shared class, read once for a change."""
    if dotted not in around.private_methods:
        around.private_methods[dotted] = _read_private_methods(dotted, around)
    return around.private_methods[dotted]


def _read_private_methods(dotted: str, around: Surroundings) -> set[str]:
    path = around.zones.file_of_module(dotted) if dotted else None
    if path is None or around.zones.zone_of(path) in ("model_code", "tests"):
        return set()
    content = around.read_head(path)
    if content is None:
        return set()
    root = SgRoot(content.decode("utf-8", "replace"), "python").root()
    for cls in root.find_all(kind="class_definition"):
        if cls.field("name").text() == dotted.rpartition(".")[2]:
            methods = {method.field("name").text() for method in _method_nodes(cls)}
            return {name for name in methods if name.startswith("_") and not name.endswith("__")}
    return set()


def _method_nodes(cls: Node) -> Iterator[Node]:
    for child in cls.field("body").named_children():
        node = child.field("definition") if child.kind() == "decorated_definition" else child
        if node is not None and node.kind() == "function_definition":
            yield node
