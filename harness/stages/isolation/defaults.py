"""What an expression is when nobody has set anything: constants, lookups that find no key, and what is made
of both. Nothing is run: an expression that this cannot evaluate has no value here, which is a finding for a
switch.
"""

import ast
from collections.abc import Callable
from typing import Final

from harness.stages.isolation.zones import ZoneIndex

__all__ = ["Constants", "is_lookup", "values_when_unset"]

LOOKUPS: Final = ("get", "getattr", "pop", "setdefault", "getenv")
TEXT_METHODS: Final[dict[str, Callable[[str], str]]] = {
    "lower": str.lower, "upper": str.upper, "strip": str.strip, "casefold": str.casefold,
}  # fmt: skip
MAX_DEPTH: Final = 30
Values = frozenset[object] | None
"""Everything that an expression may be; None where this cannot tell."""


class Constants:
    """Names that a module binds once, to something that can be evaluated; imports are followed."""

    def __init__(
        self,
        tree: ast.Module,
        package: str,
        zones: ZoneIndex,
        read: Callable[[str], bytes | None],
        depth: int = 0,
    ) -> None:
        self._zones, self._read, self._depth, self._package = zones, read, depth, package
        self._bound: dict[str, list[ast.expr]] = {}
        self._imported: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.value is not None
            ):
                self._bound.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.ClassDef):
                self._add_members(node)
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(node, package)
                self._imported |= {name.asname or name.name: f"{origin}.{name.name}" for name in node.names}

    def find(self, name: str) -> Values:
        """What a name, or `Class.MEMBER`, is."""
        bound = self._bound.get(name, [])
        if len(bound) == 1:
            return values_when_unset(bound[0], self, self._depth + 1)
        first, _, rest = name.partition(".")
        if first in self._imported and self._depth < 4:
            return self._elsewhere(f"{self._imported[first]}.{rest}".rstrip("."))
        return None

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._bound.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, own in zip(target.elts, value.elts, strict=False):
                self._bind(part, own)

    def _add_members(self, node: ast.ClassDef) -> None:
        for part in node.body:
            if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                self._bound.setdefault(f"{node.name}.{part.targets[0].id}", []).append(part.value)

    def _elsewhere(self, dotted: str) -> Values:
        path = self._zones.file_of_module(dotted)
        content = self._read(path) if path is not None else None
        if path is None or content is None or len(content) > 2**20:
            return None
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        package = ".".join(path.split("/")[:-1])
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        name = dotted.removeprefix(module).lstrip(".") or dotted.rpartition(".")[2]
        return Constants(tree, package, self._zones, self._read, self._depth + 1).find(name)


def is_lookup(node: ast.AST) -> bool:
    """Whether a call asks a mapping or object for a key that may be missing."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called in LOOKUPS


def values_when_unset(node: ast.expr | None, constants: Constants, depth: int = 0) -> Values:
    """Everything an expression may be where each lookup misses its key."""
    if node is None or depth > MAX_DEPTH:
        return None
    if isinstance(node, ast.Constant):
        return frozenset((node.value,))
    if isinstance(node, ast.Name):
        return constants.find(node.id)
    if isinstance(node, ast.Attribute):
        return constants.find(ast.unparse(node).removesuffix(".value"))
    if isinstance(node, ast.NamedExpr):
        return values_when_unset(node.value, constants, depth + 1)
    if isinstance(node, ast.IfExp):
        return _either((node.body, node.orelse), constants, depth)
    if isinstance(node, ast.BoolOp):
        return _bool(node, constants, depth)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        held = values_when_unset(node.operand, constants, depth + 1)
        return frozenset(not value for value in held) if held is not None else None
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node, constants, depth)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = [values_when_unset(part, constants, depth + 1) for part in node.elts]
        return (
            frozenset((tuple(next(iter(p)) for p in parts if p),))
            if all(p and len(p) == 1 for p in parts)
            else None
        )
    return _call(node, constants, depth) if isinstance(node, ast.Call) else None


def _call(node: ast.Call, constants: Constants, depth: int) -> Values:
    if is_lookup(node):
        given = list(node.args)
        place = 2 if getattr(node.func, "id", "") == "getattr" else 1
        if any(isinstance(arg, ast.Starred) for arg in given):
            return None
        default = given[place] if len(given) > place else next((k.value for k in node.keywords), None)
        return values_when_unset(default, constants, depth + 1) if default is not None else frozenset((None,))
    if isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS and not node.args:
        held = values_when_unset(node.func.value, constants, depth + 1)
        if held is not None and all(isinstance(value, str) for value in held):
            return frozenset(TEXT_METHODS[node.func.attr](str(value)) for value in held)
        return None
    if isinstance(node.func, ast.Name) and node.func.id in ("str", "bool") and len(node.args) == 1:
        held = values_when_unset(node.args[0], constants, depth + 1)
        convert = str if node.func.id == "str" else bool
        return frozenset(convert(value) for value in held) if held is not None else None
    return None


def _either(parts: tuple[ast.expr, ...], constants: Constants, depth: int) -> Values:
    found = [values_when_unset(part, constants, depth + 1) for part in parts]
    return (
        frozenset(v for values in found if values is not None for v in values) if None not in found else None
    )


def _bool(node: ast.BoolOp, constants: Constants, depth: int) -> Values:
    """`a or b`: a where it is true, else b; `and` the other way round."""
    stops = isinstance(node.op, ast.Or)
    found: set[object] = set()
    for part in node.values[:-1]:
        values = values_when_unset(part, constants, depth + 1)
        if values is None:
            return None
        found |= {value for value in values if bool(value) is stops}
        if all(bool(value) is stops for value in values):
            return frozenset(found)
    last = values_when_unset(node.values[-1], constants, depth + 1)
    return frozenset(found | last) if last is not None else None


def _compare(node: ast.Compare, constants: Constants, depth: int) -> Values:
    left = values_when_unset(node.left, constants, depth + 1)
    right = values_when_unset(node.comparators[0], constants, depth + 1)
    if left is None or right is None:
        return None
    return frozenset(_holds(node.ops[0], a, b) for a in left for b in right)


def _holds(operator: ast.cmpop, left: object, right: object) -> object:
    if isinstance(operator, ast.Eq | ast.Is):
        return left == right
    if isinstance(operator, ast.NotEq | ast.IsNot):
        return left != right
    if isinstance(operator, ast.In | ast.NotIn) and isinstance(right, tuple | str):
        is_in = left in right if isinstance(right, tuple) else isinstance(left, str) and left in right
        return is_in is isinstance(operator, ast.In)
    return None


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - (node.level - 1)] if node.level else []
    return ".".join([*kept, node.module] if node.module else kept)
