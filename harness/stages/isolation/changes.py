"""Every place of a Python file that changes something, with what it may be that it changes; and everything
that is called there, or handed on so that somebody else calls it.
"""

import ast
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from harness.stages.isolation.flow import Flow, Origin, Scope, flow_of
from harness.stages.isolation.names import imports_of
from harness.stages.isolation.source import Source

__all__ = ["Called", "Changed", "changes_of", "resolved_calls", "writes_of"]

SETTERS: Final = frozenset(
    ("setattr", "delattr", "operator.setitem", "operator.delitem", "operator.iadd", "operator.ior",
     "object.__setattr__", "object.__delattr__", "type.__setattr__", "type.__delattr__", "dict.update",
     "dict.__setitem__", "list.append", "list.insert", "functools.update_wrapper", "functools.wraps")
)  # fmt: skip
SETTING_METHODS: Final = ("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__iadd__", "__ior__")
MAKING_METHODS: Final = ("__init__", "__setstate__")
"""Called on an object that there is already, they make it anew."""
GROWING_METHODS: Final = (
    "update", "setdefault", "pop", "clear", "append", "insert", "extend", "remove", "popitem", "add",
    "discard",
)  # fmt: skip

IN_PLACE: Final = re.compile(r"[a-z]\w*[a-z0-9]_")
"""Methods by which a tensor is written, such as `fill_`."""
MANY_IN_PLACE: Final = re.compile(r"torch\._foreach_\w+_")
ASKING: Final = ("isinstance", "issubclass", "cast", "typing.cast", "hasattr")
"""Calls that only look at what they are given."""
_NAMED: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


class Changed(NamedTuple):
    """One change of an attribute, an item, or what a container holds."""

    first: int
    last: int
    text: str
    """The target as it is written."""
    origins: frozenset[Origin]
    """What the changed object may be."""
    is_grown: bool
    """Whether a method did it, such as `append`."""
    is_slice: bool = False
    """Whether a part of a buffer is written, `out[:rows] = x`, which is what a kernel's caller does."""


class Called(NamedTuple):
    """One call by the full name of what is called."""

    first: int
    last: int
    names: frozenset[str]
    argument: str
    """The first argument as it is written."""
    is_literal: bool
    """Whether that is a string as it stands."""
    inside: str
    """Name of the function that the call lies in; empty for a module's own line."""
    is_handed: bool = False
    """Whether it is handed on, for somebody else to call."""


def changes_of(source: Source) -> tuple[Changed, ...]:
    """Every change in a Python file, made once."""
    return source.derive("flow changes", lambda s: tuple(_changes(flow_of(s))))


def resolved_calls(source: Source) -> tuple[Called, ...]:
    """Every call whose full name is known, aliases followed, and what is handed on to be called."""
    return source.derive("flow calls", _resolved)


def _resolved(source: Source) -> tuple[Called, ...]:
    flow = flow_of(source)
    imported = frozenset(found.bound.partition(".")[0] for found in imports_of(source))
    return (*_calls(flow), *_handed_on(flow, imported))


def writes_of(source: Source) -> tuple[Changed, ...]:
    """Every place where a buffer may be written: items, methods such as `fill_`, and `out` arguments."""
    return source.derive("flow writes", lambda s: tuple(_writes(flow_of(s))))


def _writes(flow: Flow | None) -> Iterator[Changed]:
    for node, scope in flow.statements if flow is not None else ():
        assert flow is not None
        for target in _targets(node):
            if isinstance(target, ast.Subscript):
                yield from _changed(flow, node, target, target.value, scope)
            elif isinstance(node, ast.AugAssign) and isinstance(target, ast.Attribute | ast.Name):
                yield from _changed(flow, node, target, target, scope)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and IN_PLACE.fullmatch(node.func.attr):
                yield from _changed(flow, node, node.func, node.func.value, scope)
            for buffer in _written_by(flow, node, scope):
                yield from _changed(flow, node, buffer, buffer, scope)
            for keyword in node.keywords:
                if keyword.arg == "out":
                    yield from _changed(flow, node, keyword.value, keyword.value, scope)


def _written_by(flow: Flow, node: ast.Call, scope: Scope) -> list[ast.expr]:
    """Buffers that a function writes which is no method of theirs."""
    names = flow.names(node.func, scope) if node.args else frozenset[str]()
    if "numpy.copyto" in names:
        return [node.args[0]]
    first = node.args[0] if any(map(MANY_IN_PLACE.fullmatch, names)) else None
    return first.elts if isinstance(first, ast.List | ast.Tuple) else []


def _changes(flow: Flow | None) -> Iterator[Changed]:
    for node, scope in flow.statements if flow is not None else ():
        assert flow is not None
        for target in _targets(node):
            held = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
            if held is not None:
                yield from _changed(flow, node, target, held, scope)
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
                yield from _changed(flow, node, target, target, scope, is_grown=True)
        if isinstance(node, ast.Call):
            yield from _by_call(flow, node, scope)


def _by_call(flow: Flow, node: ast.Call, scope: Scope) -> Iterator[Changed]:
    names = {name.removeprefix("builtins.") for name in flow.names(node.func, scope)}
    is_setter = names & SETTERS or any(name.endswith(SETTING_METHODS) for name in names)
    method = _called_by_name(flow, node, scope)
    if is_setter and node.args:
        yield from _changed(flow, node, node, node.args[0], scope)
    elif method is not None and isinstance(node.func, ast.Call):
        given = (*node.args[:1], *(node.func.args[1:2] if method in SETTING_METHODS else ()))
        for held in given if method in (*SETTING_METHODS, *GROWING_METHODS) else ():
            yield from _changed(flow, node, node, held, scope, is_grown=method in GROWING_METHODS)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in SETTING_METHODS:
        for held in (node.func.value, *node.args[:1]):
            yield from _changed(flow, node, node, held, scope)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in MAKING_METHODS:
        made = _changed(flow, node, node.func, node.func.value, scope)
        yield from (m for m in made if all(origin.kind != "import" for origin in m.origins))
    elif isinstance(node.func, ast.Attribute) and node.func.attr in GROWING_METHODS:
        yield from _changed(flow, node, node.func, node.func.value, scope, is_grown=True)


def _called_by_name(flow: Flow, node: ast.Call, scope: Scope) -> str | None:
    """The method that `methodcaller("name", ...)(thing)` calls."""
    maker = node.func if isinstance(node.func, ast.Call) and node.func.args else None
    if maker is None or "operator.methodcaller" not in flow.names(maker.func, scope):
        return None
    name = maker.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _changed(
    flow: Flow, node: ast.AST, target: ast.expr, held: ast.expr, scope: Scope, is_grown: bool = False
) -> Iterator[Changed]:
    found = frozenset(o for o in flow.origins(held, scope) if o.held == 0)
    if found:
        place = (
            target if isinstance(node, ast.withitem | ast.comprehension | ast.For | ast.AsyncFor) else node
        )
        first, last = getattr(place, "lineno", 0), getattr(place, "end_lineno", 0) or 0
        yield Changed(first, last, ast.unparse(target)[:300], found, is_grown, _is_slice(target))


def _is_slice(target: ast.expr) -> bool:
    key = target.slice if isinstance(target, ast.Subscript) else None
    parts = key.elts if isinstance(key, ast.Tuple) else [key]
    return any(isinstance(p, ast.Slice) or (isinstance(p, ast.Constant) and p.value is ...) for p in parts)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.comprehension):
        waiting = [node.target]
    elif isinstance(node, ast.AnnAssign):
        waiting = [node.target] if node.value is not None else []
    else:
        waiting = [node.optional_vars] if isinstance(node, ast.withitem) and node.optional_vars else []
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def _calls(flow: Flow | None) -> Iterator[Called]:
    for node, scope in flow.statements if flow is not None else ():
        if flow is not None and isinstance(node, ast.ClassDef):  # a base class is as good as a call of it
            names = frozenset(name for base in node.bases for name in flow.names(base, scope))
            if names:
                yield Called(node.lineno, node.lineno, names, node.name, False, _function_around(scope))
    for node, scope in flow.calls if flow is not None else ():
        assert flow is not None
        names = flow.names(node.func, scope)
        if (method := _called_by_name(flow, node, scope)) is not None and node.args:
            names = frozenset(f"{origin.dotted}.{method}" for origin in flow.origins(node.args[0], scope))
        if names:
            first = node.args[0] if node.args else None
            is_literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
            yield Called(
                node.lineno,
                node.end_lineno or node.lineno,
                names,
                ast.unparse(first)[:200] if first is not None and not isinstance(first, ast.Lambda) else "",
                is_literal,
                _function_around(scope),
            )


def _handed_on(flow: Flow | None, imported: frozenset[str]) -> Iterator[Called]:
    """What was imported and is a decorator, an argument, or part of a container: somebody else calls it."""
    for expression, scope in _values(flow) if flow is not None else ():
        assert flow is not None
        root = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in imported and (names := flow.names(expression, scope)):
            last = expression.end_lineno or expression.lineno
            yield Called(expression.lineno, last, names, "", False, _function_around(scope), is_handed=True)


def _values(flow: Flow) -> Iterator[tuple[ast.expr, Scope]]:
    waiting = list(flow.decorators)
    for node, scope in flow.calls:
        if not (isinstance(node.func, ast.Name | ast.Attribute) and ast.unparse(node.func) in ASKING):
            waiting += [(part, scope) for part in (*node.args, *(k.value for k in node.keywords))]
    for statement, scope in flow.statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.NamedExpr) and statement.value is not None:
            waiting.append((statement.value, scope))
    while waiting:
        value, scope = waiting.pop()
        if isinstance(value, ast.Name | ast.Attribute):
            yield value, scope
        elif isinstance(value, ast.List | ast.Tuple | ast.Set):
            waiting += [(part, scope) for part in value.elts]
        elif isinstance(value, ast.Dict):
            waiting += [(part, scope) for part in value.values]
        elif isinstance(value, ast.IfExp):
            waiting += [(value.body, scope), (value.orelse, scope)]
        elif isinstance(value, ast.BoolOp):
            waiting += [(part, scope) for part in value.values]


def _function_around(scope: Scope) -> str:
    place: Scope | None = scope
    while place is not None and not isinstance(place.node, ast.FunctionDef | ast.AsyncFunctionDef):
        place = place.above
    return place.node.name if place is not None and isinstance(place.node, _NAMED) else ""
