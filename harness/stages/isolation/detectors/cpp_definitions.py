"""What a C++ or CUDA file declares, compared between base and head: functions that callers elsewhere use."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from harness.stages.isolation.source import Node

__all__ = ["Accepting", "CppFunction", "Overloads", "cpp_functions"]

PUBLIC_AT_FIRST: Final = ("struct_specifier", "union_specifier")
CLASSES: Final = ("class_specifier", *PUBLIC_AT_FIRST)
SHUT: Final = ("compound_statement", "lambda_expression", "parameter_list", "friend_declaration")
"""What is declared in these is nobody else's."""
PARAMETERS: Final = ("parameter_declaration", "optional_parameter_declaration")
NAMES: Final = (
    "identifier", "field_identifier", "qualified_identifier", "operator_name", "destructor_name",
    "template_function",
)  # fmt: skip
_MISREAD: Final = re.compile(r">\w")
"""A return type that was taken for part of the name, as happens behind an unknown macro."""
_STATIC: Final = re.compile(r"(\w+\s+)*static\b")
_INNER_NAMES: Final = ("identifier", "field_identifier")


class CppFunction(NamedTuple):
    """One overload as its callers meet it."""

    line: int
    types: tuple[str, ...]
    """Types of the parameters, without names; `...` for any number of further ones."""
    defaults: tuple[str | None, ...]
    """Default of each parameter; None where a caller must give one."""


Overloads = dict[str, list[CppFunction]]
"""Functions by their name with its namespaces and classes."""


def cpp_functions(root: Node | None) -> Overloads:
    """Functions that another file can call: none that is static, private, in a namespace without a name, or
    inside a function. Names that a macro makes are not seen. Every node is looked at once.
    """
    found: dict[str, dict[tuple[object, ...], CppFunction]] = {}
    waiting = [] if root is None else [_Place(root, "", is_member=False)]
    while waiting:
        place = waiting.pop()
        if place.node.kind() == "function_declarator" and (name := _name(place.node)) is not None:
            function = _function(place.node)
            found.setdefault(place.scope + name, {}).setdefault(function[1:], function)
        waiting.extend(reversed(tuple(_open_below(place))))
    return {name: list(overloads.values()) for name, overloads in found.items()}


class Accepting:
    """Overloads of one name, to ask which calls fit them: as quick for thousands as for one."""

    def __init__(self, overloads: Iterable[CppFunction]) -> None:
        self._root = _Branch()
        for function in overloads:
            branch = self._root
            branch.add(function)
            for word in function.types:
                branch = branch.below.setdefault(word, _Branch())
                branch.add(function)

    def first(self, types: Sequence[str]) -> CppFunction | None:
        """The first overload whose parameters begin with these types."""
        branch = self._branch(types)
        return None if branch is None else branch.first

    def accepts(self, function: CppFunction) -> bool:
        """Whether every call that fitted the function fits one of these: the same types, further ones with a
        default, and nothing newly required.
        """
        branch = self._branch(function.types)
        return branch is not None and branch.required <= _required(function)

    def _branch(self, types: Sequence[str]) -> "_Branch | None":
        branch: _Branch | None = self._root
        for word in types:
            branch = None if branch is None else branch.below.get(word)
        return branch


@dataclass(slots=True)
class _Branch:
    """Overloads that begin with the same types."""

    below: dict[str, "_Branch"] = field(default_factory=dict)
    first: CppFunction | None = None
    required: float = math.inf
    """Least number of arguments that one of them needs."""

    def add(self, function: CppFunction) -> None:
        self.first = self.first or function
        self.required = min(self.required, _required(function))


class _Place(NamedTuple):
    """A node that callers of other files may see, and where it lies."""

    node: Node
    scope: str
    """Namespaces and classes around it, each with `::` behind it."""
    is_member: bool


def _open_below(place: _Place) -> Iterator[_Place]:
    """Nodes right below this one that other files may see."""
    node, kind = place.node, place.node.kind()
    is_declared = kind in ("function_definition", "declaration", "field_declaration")
    if kind in SHUT or (is_declared and not place.is_member and _STATIC.match(node.text())):
        return
    if kind not in (*CLASSES, "namespace_definition"):
        yield from (_Place(child, place.scope, is_member=False) for child in node.named_children())
        return
    name, body = node.field("name"), node.field("body")
    if name is None or body is None:
        return
    scope = f"{place.scope}{name.text()}::"
    said = "private" if kind == "class_specifier" else "public"
    for child in body.named_children():
        if child.kind() == "access_specifier":
            said = child.text().strip(" :")
        elif said == "public":
            yield _Place(child, scope, is_member=kind in CLASSES)


def _name(declarator: Node) -> str | None:
    named = declarator.field("declarator")
    if named is None or named.kind() not in NAMES:
        return None
    text = re.sub(r"\s+", "", named.text())
    return None if _MISREAD.search(text) else text


def _function(declarator: Node) -> CppFunction:
    listed = declarator.field("parameters")
    parameters = [p for p in listed.named_children() if p.kind() in PARAMETERS]
    types = [t for t in map(_type, parameters) if t != "void"]
    if listed.text().removesuffix(")").rstrip().endswith("..."):
        types.append("...")
    defaults = [_default(p) for p in parameters][: len(types)]
    line = declarator.range().start.line + 1
    return CppFunction(line, tuple(types), (*defaults, *[None] * (len(types) - len(defaults))))


def _required(function: CppFunction) -> int:
    return sum(default is None for default in function.defaults)


def _type(parameter: Node) -> str:
    """A parameter as written, without name, default and attributes that change nothing for callers."""
    text = parameter.text()
    if parameter.kind() == "optional_parameter_declaration":
        text = text[: parameter.field("default_value").range().start.index - parameter.range().start.index]
        text = text.rstrip().removesuffix("=")
    name = _declared(parameter.field("declarator"))
    if name is not None:
        start = name.range().start.index - parameter.range().start.index
        text = text[:start] + " " + text[start + len(name.text()) :]
    text = re.sub(r"\[\[\w+\]\]|\b(__restrict__|__restrict|restrict)\b", " ", text)
    words = " ".join(text.split())
    return re.sub(r"\s*([*&<>,:()\[\]])\s*", r"\1", words)


def _declared(declarator: Node | None) -> Node | None:
    """The name in a declarator such as `const* const name` or `(&name)[4]`."""
    if declarator is None:
        return None
    if declarator.kind() in _INNER_NAMES:
        return declarator
    return next(_names_in(declarator), None)


def _names_in(declarator: Node) -> Iterator[Node]:
    for child in declarator.named_children():
        if child.kind() in _INNER_NAMES:
            yield child
        elif child.kind().endswith("declarator"):
            yield from _names_in(child)


def _default(parameter: Node) -> str | None:
    if parameter.kind() != "optional_parameter_declaration":
        return None
    return " ".join(str(parameter.field("default_value").text()).split())
