"""What names in a Python module stand for, as far as its syntax tells.

Invariant: a name maps to the dotted name of what was imported under it; a variable that was assigned such an
expression maps to the same. Values that travel through calls or containers are not followed.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from harness.stages.isolation.source import Node, Source

__all__ = [
    "HOLDS_STATEMENTS", "Imported", "absolute_name", "imported_names", "imports_of", "package_of",
    "root_names", "statements_of", "string_value", "typed_parameters",
]  # fmt: skip

MAX_CHAIN: Final = 200
REACHED: Final = frozenset(
    ("os", "sys", "shutil", "subprocess", "threading", "multiprocessing", "socket", "ssl", "ctypes",
     "importlib", "builtins", "atexit", "pickle", "marshal", "tempfile", "pathlib", "gc", "_thread",
     "asyncio", "mmap", "fcntl", "runpy")
)  # fmt: skip
"""Modules of the standard library that reach out; whoever imports one hands it on as an attribute."""
HOLDS_STATEMENTS: Final = (ast.stmt, ast.ExceptHandler, ast.match_case)
CHOICES: Final = ("list", "tuple", "dictionary", "conditional_expression", "boolean_operator")
CHAIN: Final = ("attribute", "subscript", "call", "parenthesized_expression", "named_expression")


class Imported(NamedTuple):
    """One thing that a statement imports."""

    first: int
    last: int
    """Lines of the statement."""
    bound: str
    """The name that stands for it here; `*` for all that a module has."""
    dotted: str
    """What it is."""


def imports_of(source: Source) -> tuple[Imported, ...]:
    """Each import, wherever it stands."""
    return source.derive("imports", lambda s: tuple(_imports(s)))


def statements_of(module: ast.Module) -> Iterator[ast.AST]:
    """Every statement; what can hold one is looked into, which is a small part of a tree."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += (child for child in ast.iter_child_nodes(node) if isinstance(child, HOLDS_STATEMENTS))


def _imports(source: Source) -> Iterator[Imported]:
    package = package_of(source.path)
    if source.module is None:
        yield from _imports_of_unread(source, package)
        return
    for node in statements_of(source.module):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.partition(".")[0]
                yield Imported(node.lineno, node.end_lineno or node.lineno, bound, name.name)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            origin = absolute_name("." * node.level + (node.module or ""), package)
            for name in node.names:
                dotted = origin if name.name == "*" else f"{origin}.{name.name}"
                yield Imported(node.lineno, node.end_lineno or node.lineno, name.asname or name.name, dotted)


def _imports_of_unread(source: Source, package: str) -> Iterator[Imported]:
    """The same for a file that this interpreter cannot parse."""
    root = source.root
    if root is None or source.language != "python":
        return
    for node in root.find_all(kind="import_statement"):
        place = node.range().start.line + 1, node.range().end.line + 1
        for child in node.named_children():
            if child.kind() == "aliased_import":
                yield Imported(*place, child.field("alias").text(), child.field("name").text())
            elif child.kind() == "dotted_name":
                yield Imported(*place, child.text().split(".")[0], child.text())
    for node in root.find_all(kind="import_from_statement"):
        place = node.range().start.line + 1, node.range().end.line + 1
        module = node.field("module_name")
        origin = absolute_name(module.text(), package) if module is not None else ""
        for name in node.field_children("name"):
            if name.kind() == "aliased_import":
                yield Imported(*place, name.field("alias").text(), f"{origin}.{name.field('name').text()}")
            else:
                yield Imported(*place, name.text(), f"{origin}.{name.text()}")
        if any(child.kind() == "wildcard_import" for child in node.children()):
            yield Imported(*place, "*", origin)


def imported_names(source: Source) -> dict[str, str]:
    """Dotted names by the name that stands for them, aliases by assignment included."""
    return source.derive("names", _imported_names)


def _imported_names(source: Source) -> dict[str, str]:
    root = source.root
    if root is None or source.language != "python":
        return {}
    names: dict[str, str] = {}
    for _, _, bound, dotted in imports_of(source):
        names.setdefault(bound, dotted if bound != dotted.split(".")[0] else bound)
    for assignment in root.find_all(kind="assignment"):
        left, right = assignment.field("left"), assignment.field("right")
        if left is None or right is None or left.kind() != "identifier":
            continue
        origin = next(iter(root_names(right, through_calls=False) & names.keys()), None)
        if origin is not None and right.kind() in ("identifier", "attribute", "subscript"):
            names.setdefault(left.text(), f"{names[origin]}.{right.text().partition('.')[2]}".rstrip("."))
    return names


def typed_parameters(source: Source, names: Mapping[str, str]) -> dict[str, str]:
    """Dotted class names by the parameters that are annotated with an imported class."""
    root = source.root
    found: dict[str, str] = {}
    for parameter in root.find_all(kind="typed_parameter") if root is not None else ():
        annotation = parameter.field("type")
        name = next((c for c in parameter.named_children() if c.kind() == "identifier"), None)
        if annotation is None or name is None:
            continue
        first, _, rest = annotation.text().strip("\"' ").split("[")[0].partition(".")
        if first in names:
            found.setdefault(name.text(), f"{names[first]}.{rest}".rstrip("."))
    return found


def package_of(path: str) -> str:
    """Dotted package that a module's relative imports start from."""
    parts = path.removesuffix(".py").split("/")[:-1]
    return ".".join(parts)


def root_names(node: Node | None, through_calls: bool = True) -> frozenset[str]:
    """Identifiers that a chain such as `a.b[0].c` may start from; several for `[a, b][i].c` or `(a or b).c`.

    With `through_calls`, calls that give the thing itself are followed: `getattr(a, "b")`, `vars(a)`,
    `type(a)`, and a module that is imported by name counts as the import machinery's. Other calls give
    something new.
    """
    for _ in range(MAX_CHAIN):
        if node is None or node.kind() not in CHAIN:
            break
        if node.kind() == "call":
            node = _through(node) if through_calls else None
        elif node.kind() == "named_expression":
            node = node.field("value")
        else:
            node = node.child(1) if node.kind() == "parenthesized_expression" else node.child(0)
    if node is not None and node.kind() in CHOICES:
        return frozenset(found.text() for found in node.find_all(kind="identifier"))
    return frozenset((node.text(),)) if node is not None and node.kind() == "identifier" else frozenset()


def _through(call: Node) -> Node | None:
    function = call.field("function")
    name = function.text().rpartition(".")[2]
    if name in ("getattr", "vars", "type"):
        return next(iter(call.field("arguments").named_children()), None)
    return function if name in ("import_module", "__import__") else None


def string_value(node: Node | None) -> str | None:
    """Text of a plain string literal; None for anything computed."""
    if node is None or node.kind() != "string":
        return None
    if any(child.kind() == "interpolation" for child in node.children()):
        return None
    return "".join(child.text() for child in node.children() if child.kind() == "string_content")


def reached_name(dotted: str) -> str | None:
    """The name of a module that reaches out, and what follows, where another module's attribute is taken for
    it: `os.replace` of `torch.serialization.os.replace`.
    """
    parts = dotted.split(".")
    place = next((i for i in range(len(parts) - 1, 0, -1) if parts[i] in REACHED), None)
    return None if place is None else ".".join(parts[place:])


def absolute_name(module: str, package: str) -> str:
    if not module.startswith("."):
        return module
    name = module.lstrip(".")
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - (len(module) - len(name) - 1)]
    return ".".join([*kept, name] if name else kept)
