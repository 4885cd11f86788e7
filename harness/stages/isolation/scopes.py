"""What a name of a Python file is bound to, and where a value comes from: the records of the flow.

Invariant: an origin says how many containers of the file's own lie around what was imported or handed in, so
that putting into a container and taking out of it are counted and never guessed.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from harness.stages.isolation.names import reached_name

__all__ = [
    "NONE", "SELF", "Binding", "InstanceOf", "Origin", "Origins", "Scope", "annotated", "is_own_class",
    "is_self", "put_in", "taken_out", "with_reached",
]  # fmt: skip

SELF: Final = ("self", "cls")
"""Names of the first parameter of a method."""


class Origin(NamedTuple):
    """Where a value comes from."""

    kind: str
    """`import`: the dotted name of what was imported; `instance`: of the class that an annotation names, or
    of the getter that gave it; `handed`: the name under which it was handed in.
    """
    dotted: str
    held: int = 0
    """Containers of the file's own around it."""

    def part(self, name: str) -> "Origin":
        """An attribute of it."""
        return Origin(self.kind, f"{self.dotted}.{name}", self.held)


Origins = frozenset[Origin]
NONE: Final[Origins] = frozenset()


@dataclass(eq=False)
class Scope:
    """One function, class, comprehension or module with what it binds."""

    node: ast.AST
    above: "Scope | None"
    bindings: dict[str, list["Binding"]] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)

    def bind(self, name: str, binding: "Binding") -> None:
        """One more thing that the name may stand for."""
        self.bindings.setdefault(name, []).append(binding)


@dataclass(eq=False, frozen=True)
class Binding:
    """One way in which a name gets its value."""

    value: ast.expr | None
    scope: Scope | None
    origins: Origins = NONE
    definition: ast.AST | None = None
    parts: int = 0
    """How often a part of the value is taken: 1 for an element of what is looped over or unpacked."""


class InstanceOf(ast.expr):
    """An expression for an instance of the class that `of` names."""

    def __init__(self, of: ast.expr) -> None:
        super().__init__()
        self.of = of


def annotated(node: ast.expr | None) -> Iterator[ast.expr]:
    """Names in an annotation: `A`, `a.B`, `"A"`, `A | None`, `Optional[A]`, `type[A]`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
        try:
            yield from annotated(ast.parse(node.value, mode="eval").body)
        except (SyntaxError, ValueError):
            return
    elif isinstance(node, ast.Name | ast.Attribute):
        yield node
    elif isinstance(node, ast.BinOp):
        yield from annotated(node.left)
        yield from annotated(node.right)
    elif isinstance(node, ast.Subscript):
        yield from annotated(node.slice)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in SELF


def is_own_class(node: ast.expr) -> bool:
    """`cls`, `self`, `self.__class__` or `type(self)`."""
    if isinstance(node, ast.Attribute) and node.attr == "__class__":
        return is_self(node.value)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "type"
        and node.args
    ):
        return is_self(node.args[0])
    return is_self(node)


def with_reached(found: Iterable[Origin]) -> Origins:
    """Origins, and beside each that passes through another module the module that it leads to."""
    given = tuple(found)
    named = [(o, reached_name(o.dotted)) for o in given if o.kind == "import"]
    return frozenset((*given, *(o._replace(dotted=name) for o, name in named if name is not None)))


def put_in(found: Origins) -> Origins:
    return frozenset(origin._replace(held=origin.held + 1) for origin in found)


def taken_out(found: Origins) -> Origins:
    return frozenset(origin._replace(held=max(0, origin.held - 1)) for origin in found)
