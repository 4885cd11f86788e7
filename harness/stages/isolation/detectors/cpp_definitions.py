"""What a C++ or CUDA file declares, compared between base and head: functions that callers elsewhere use."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from harness.stages.isolation.source import Node

__all__ = ["CppFunction", "Overloads", "accepted_by", "cpp_functions"]

PUBLIC_AT_FIRST: Final = ("struct_specifier", "union_specifier")
CLASSES: Final = ("class_specifier", *PUBLIC_AT_FIRST)
PARAMETERS: Final = ("parameter_declaration", "optional_parameter_declaration")
NAMES: Final = (
    "identifier", "field_identifier", "qualified_identifier", "operator_name", "destructor_name",
    "template_function",
)  # fmt: skip
_MISREAD: Final = re.compile(r">\w")
"""A return type that was taken for part of the name, as happens behind an unknown macro."""
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
    inside a function. Names that a macro makes are not seen.
    """
    found: Overloads = {}
    for node in root.find_all(kind="function_declarator") if root is not None else ():
        name = _public_name(node)
        if name is None:
            continue
        parameters = [p for p in node.field("parameters").named_children() if p.kind() in PARAMETERS]
        types = [t for t in map(_type, parameters) if t != "void"]
        if re.search(r"\.\.\.\s*\)$", node.field("parameters").text()):
            types.append("...")
        defaults = [_default(p) for p in parameters][: len(types)]
        function = CppFunction(
            node.range().start.line + 1, tuple(types), (*defaults, *[None] * (len(types) - len(defaults)))
        )
        if all(function[1:] != other[1:] for other in found.get(name, ())):
            found.setdefault(name, []).append(function)
    return found


def accepted_by(function: CppFunction, after: list[CppFunction]) -> bool:
    """Whether every call that fitted the function fits one of those: the same types, further ones with a
    default, and nothing newly required.
    """
    required = sum(default is None for default in function.defaults)
    length = len(function.types)
    return any(
        other.types[:length] == function.types
        and sum(default is None for default in other.defaults) <= required
        for other in after
    )


def _public_name(declarator: Node) -> str | None:
    named = declarator.field("declarator")
    if named is None or named.kind() not in NAMES:
        return None
    parts = [re.sub(r"\s+", "", named.text())]
    if _MISREAD.search(parts[0]):
        return None
    inner = declarator
    for above in declarator.ancestors():
        kind = above.kind()
        if kind in ("compound_statement", "lambda_expression", "parameter_list", "friend_declaration"):
            return None
        if kind in ("function_definition", "declaration", "field_declaration"):
            is_member = above.parent() is not None and above.parent().kind() == "field_declaration_list"
            if not is_member and re.match(r"(\w+\s+)*static\b", above.text()):
                return None
        if kind in CLASSES:
            if _is_hidden(inner, above) or above.field("name") is None:
                return None
            parts.insert(0, above.field("name").text())
        if kind == "namespace_definition":
            if above.field("name") is None:
                return None
            parts.insert(0, above.field("name").text())
        inner = above if kind not in ("field_declaration_list",) else inner
    return "::".join(parts)


def _is_hidden(member: Node, cls: Node) -> bool:
    """Whether the last access specifier above a member hides it from callers."""
    body = cls.field("body")
    said = "public" if cls.kind() in PUBLIC_AT_FIRST else "private"
    for child in body.children() if body is not None else ():
        if child.range().start.index >= member.range().start.index:
            break
        if child.kind() == "access_specifier":
            said = child.text().strip(" :")
    return said != "public"


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
