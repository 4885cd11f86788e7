"""Python code that changes something it imported, wherever that something is shared.

Shared is every module that is not model code: other code of the repository, the standard library and third
parties alike.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.names import (
    imported_names,
    imports_of,
    root_names,
    string_value,
    typed_parameters,
)
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = [
    "find_computed_attribute", "find_imported_object_changed", "find_model_code_imported",
    "find_module_imported", "find_shared_instance_changed",
]  # fmt: skip

OWN_ZONES: Final = ("model_code", "tests")
CHANGING_CALLS: Final = (
    "setattr",
    "delattr",
    "object.__setattr__",
    "type.__setattr__",
    "operator.setitem",
    "operator.delitem",
)
CHANGING_METHODS: Final = (
    "update",
    "setdefault",
    "pop",
    "clear",
    "append",
    "insert",
    "extend",
    "remove",
    "popitem",
)


def find_imported_object_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Attributes of imported shared modules and classes that are assigned, deleted or set by name."""
    names = {n: dotted for n, dotted in imported_names(source).items() if _is_shared(dotted, around)}
    for node, target in source.derive("changes", lambda s: tuple(_changes(s))):
        origin = next(
            (n for n in sorted(root_names(target) & names.keys()) if not _is_local(node, n, names)), None
        )
        if origin is None:
            continue
        if not any(re.fullmatch(expression, target.text()) for expression in rule.allow):
            yield from _match(source, node, f"changes {names[origin]}, which is imported")


def find_shared_instance_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Attributes of parameters whose annotated class is shared code of the same repository."""
    instances = {
        name: dotted
        for name, dotted in typed_parameters(source, imported_names(source)).items()
        if around.zones.zone_of_module(dotted) not in (None, *OWN_ZONES)
        and not any(re.fullmatch(expression, dotted) for expression in rule.allow)
    }
    for node, target in source.derive("changes", lambda s: tuple(_changes(s))):
        origin = next(iter(sorted(root_names(target, through_calls=False) & instances.keys())), None)
        if origin is not None:
            yield from _match(source, node, f"changes an instance of {instances[origin]}")


def find_computed_attribute(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """`getattr` with a computed name on shared code of the repository, or on a module that is a pattern."""
    root = source.root
    if root is None or "getattr" not in (source.after or ""):
        return
    names = {
        name
        for name, dotted in imported_names(source).items()
        if around.zones.zone_of_module(dotted) not in (None, *OWN_ZONES)
        or dotted.split(".")[0] in rule.patterns
    }
    either = [{"pattern": "getattr($OBJECT, $NAME)"}, {"pattern": "getattr($OBJECT, $NAME, $DEFAULT)"}]
    for call in root.find_all({"rule": {"any": either}}):
        name = call.get_match("NAME")
        if name.kind() != "identifier" and string_value(name) is not None:
            continue
        if root_names(call.get_match("OBJECT")) & names:
            yield from _match(source, call, "reads a computed name of something imported")


def find_model_code_imported(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Imports of model code."""
    for node, _, dotted in imports_of(source):
        if around.zones.zone_of_module(dotted) == "model_code":
            yield from _match(source, node, f"imports {dotted}, which is model code")


def find_module_imported(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Imports of modules that any pattern matches."""
    for node, _, dotted in imports_of(source):
        if any(re.match(pattern, dotted) for pattern in rule.patterns):
            yield from _match(source, node, f"imports {dotted}")


def _changes(source: Source) -> Iterator[tuple[Node, Node]]:
    """(statement or call, expression that it changes)."""
    root = source.root
    if root is None:
        return
    for kind in ("assignment", "augmented_assignment"):
        for node in root.find_all(kind=kind):
            for target in _targets(node.field("left")):
                yield node, target
    for kind in ("for_statement", "for_in_clause"):
        for node in root.find_all(kind=kind):
            for target in _targets(node.field("left")):
                yield target, target
    for node in root.find_all(kind="as_pattern_target"):
        for target in _targets(node.child(0)):
            yield target, target
    for node in root.find_all(kind="delete_statement"):
        for target in _targets(node.child(1)):
            yield node, target
    for call in root.find_all(kind="call"):
        function = call.field("function")
        if function is None:
            continue
        if function.kind() in ("identifier", "attribute") and function.text() in CHANGING_CALLS:
            first = next(iter(call.field("arguments").named_children()), None)
            if first is not None:
                yield call, first
        elif function.kind() == "attribute" and function.field("attribute").text() in CHANGING_METHODS:
            holder = function.field("object")
            if holder.kind() == "attribute" and re.search(
                r"\.(__dict__|_?[A-Za-z_]*registry)$", holder.text()
            ):
                yield call, holder
            elif holder.kind() == "call" and holder.text().startswith("vars("):
                yield call, holder.field("arguments").child(1)


def _targets(left: Node | None) -> Iterator[Node]:
    """Attributes and items among the targets of an assignment."""
    if left is None:
        return
    if left.kind() in ("attribute", "subscript"):
        if (
            (inner := left.child(0)) is not None
            and inner.kind() == "call"
            and inner.text().startswith("vars(")
        ):
            yield inner.field("arguments").child(1)
        else:
            yield left
    elif left.kind() in ("pattern_list", "tuple_pattern", "list_pattern", "expression_list"):
        for child in left.named_children():
            yield from _targets(child)


def _is_shared(dotted: str, around: Surroundings) -> bool:
    return around.zones.zone_of_module(dotted) not in OWN_ZONES


def _is_local(node: Node, name: str, names: Mapping[str, str]) -> bool:
    """Whether a function around `node` binds that name itself, other than to something imported."""
    for above in node.ancestors():
        if above.kind() != "function_definition":
            continue
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", above.field("parameters").text()):
            return True
        for binding in above.find_all({"rule": {"any": [{"kind": "assignment"}, {"kind": "for_statement"}]}}):
            left, right = binding.field("left"), binding.field("right")
            if (
                left is None
                or right is None
                or name not in re.findall(r"(?<![\w.])\w+(?![\w.(\[])", left.text())
            ):
                continue
            if binding.kind() == "for_statement" or not root_names(right, through_calls=False) & names.keys():
                return True
    return False


def _match(source: Source, node: Node, note: str) -> Iterator[Match]:
    place = node.range()
    line = source.first_added(place.start.line + 1, place.end.line + 1)
    if line is not None:
        yield Match(line, source.lines[line - 1].strip(), note)
