"""Defaults that select the optimised path when nobody asked for it."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.defaults import Constants, is_lookup, values_when_unset
from harness.stages.isolation.detectors.unset_paths import SETTINGS, chosen_when_unset
from harness.stages.isolation.flow import flow_of
from harness.stages.isolation.names import package_of
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_open_guard", "find_switch_default"]

NEGATIVE: Final = re.compile(
    r"^(.*_)?(disable|disallow|no|skip|without|stock|legacy|opt_out|force_stock)_?"
    r".*(fast|optimi[sz]|speciali[sz]|latency|fused|turbo|decode_backend)", re.IGNORECASE,
)  # fmt: skip
"""Names of settings that one must know to get the stock path."""
STOCK: Final = re.compile(r"^(None|False)$|(^|[._])(stock|fallback|auto|off|default)(\b|_)|^super\(\)")
"""What a function gives that leaves the work to the stock path."""


def find_open_guard(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Conditions that hold when every setting is missing, where they are about a path: the rule's patterns
    say by what they read; and settings that are named for what they switch off.
    """
    flow = flow_of(source)
    if flow is None:
        return
    constants = _constants(source, around)
    for choice in flow.choices:
        values = None if _declines(choice) else values_when_unset(choice.test, constants)
        if values and all(values) and _is_about(rule, ast.unparse(choice.test)[:2000]):
            yield from _at(source, choice.test, "holds when nobody has set anything")
    for node, _ in flow.calls:
        if is_lookup(node) and any(map(_is_negative, node.args)):
            yield from _at(source, node, "is a switch for those who want the stock path")
    if source.module is not None and SETTINGS.search(source.after or ""):
        for chosen in chosen_when_unset(source.module, constants):
            if _is_about(rule, ast.unparse(chosen)[:2000]):
                yield from _at(source, chosen, "is what this gives when nobody has set anything")


def find_switch_default(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Defaults of the claim's switch that are not its off value, or that cannot be evaluated."""
    switch = around.switch
    if source.module is None or switch is None or switch.name not in (source.after or ""):
        return
    constants = _constants(source, around)
    for node in ast.walk(source.module):
        for value in _given(node, switch.name):
            given = values_when_unset(value, constants) or frozenset()
            if wrong := sorted(str(v) for v in given if v not in (switch.off, None, False)):
                yield from _at(source, value, f"a table gives it {wrong[0]!r}, not {switch.off!r}")
    for place, value in _defaults(source.module, switch.name):
        found = values_when_unset(value, constants)
        if found is None:
            yield from _at(source, place, "its default cannot be evaluated")
        elif wrong := sorted(str(v) for v in found if v not in (switch.off, None, False)):
            yield from _at(source, place, f"the default is {wrong[0]!r}, not {switch.off!r}")


def _defaults(module: ast.Module, name: str) -> Iterator[tuple[ast.expr | ast.arg | ast.AnnAssign, ast.expr]]:
    """(place, expression) for each lookup of the switch with all that is done on a miss, and each default."""
    parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and is_lookup(node) and any(_is_text(arg, name) for arg in node.args):
            whole: ast.expr = node
            while isinstance(above := parents.get(whole), ast.BoolOp) or _is_text_method(above, parents):
                whole = above if isinstance(above, ast.BoolOp) else parents[above]  # type: ignore[assignment,index]  # a method's call lies around its attribute
            yield node, whole
        elif isinstance(node, ast.AnnAssign) and node.value is not None and _names(node.target, name):
            yield node, node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args]
            pairs = [*zip(args[len(args) - len(node.args.defaults) :], node.args.defaults, strict=True)]
            pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
            yield from ((arg, default) for arg, default in pairs if arg.arg == name)


def _given(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """What a table, `{name: value}` or `dict(name=value)`, gives the switch."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from (value for key, value in pairs if key is not None and _is_text(key, name))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        yield from (keyword.value for keyword in node.keywords if keyword.arg == name)


def _is_text_method(node: ast.AST | None, parents: dict[ast.AST, ast.AST]) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(parents.get(node), ast.Call)


def _names(node: ast.expr, name: str) -> bool:
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == name


def _is_text(node: ast.expr, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _declines(choice: ast.If | ast.IfExp) -> bool:
    """Whether all that a branch does is to give the stock path, which is what an unset switch is to give."""
    body = choice.body if isinstance(choice, ast.If) else []
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else choice
    return value is None or (value is not choice and STOCK.search(ast.unparse(value)) is not None)


def _is_negative(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(NEGATIVE.match(node.value))


def _is_about(rule: Rule, text: str) -> bool:
    return any(re.search(pattern, text) for pattern in rule.patterns)


def _constants(source: Source, around: Surroundings) -> Constants:
    module = source.module
    assert module is not None
    return source.derive(
        "constants", lambda s: Constants(module, package_of(s.path), around.zones, around.read_head)
    )


def _at(source: Source, node: ast.expr | ast.arg | ast.AnnAssign, note: str) -> Iterator[Match]:
    line = source.first_added(node.lineno, node.end_lineno or node.lineno)
    if line is not None:
        yield Match(line, source.lines[line - 1].strip(), note)
