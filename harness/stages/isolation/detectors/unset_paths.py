"""What a function of the model returns when nobody has set anything.

Only what settings decide is followed: a branch whose condition this cannot evaluate leaves the answer open,
and an open answer is no finding.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from harness.stages.isolation.defaults import Constants, is_lookup, values_when_unset

__all__ = ["SETTINGS", "chosen_when_unset"]

SETTINGS: Final = re.compile(
    r"\b(additional_config|extra(_\w+)?|options|settings|user_config|hf_overrides|model_kwargs)\b"
)
"""Names of mappings in which a user says what to use."""
MISSES: Final = ("KeyError", "AttributeError", "LookupError")
Answer = list[tuple[ast.expr, bool]]
"""(expression, whether a setting decided for it) of everything that may be returned."""


def chosen_when_unset(module: ast.Module, constants: Constants) -> Iterator[ast.expr]:
    """Expressions that functions return because a setting is missing; one for each such function."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            answer, _, _ = _run(node.body, constants, False)
            if len(answer) == 1 and answer[0][1]:
                yield answer[0][0]


def _run(body: Sequence[ast.stmt], constants: Constants, decided: bool) -> tuple[Answer, bool, bool]:
    """(answers, whether the end is reached, whether a setting decided on the way there)."""
    answers: Answer = []
    for node in body:
        if isinstance(node, ast.Return):
            value, by_setting = _choice(node.value, constants) if node.value else (ast.Constant(None), False)
            return [*answers, (value, decided or by_setting)], False, decided
        if isinstance(node, ast.Raise):
            return answers, False, decided
        branches, by_setting = _branches(node, constants)
        reaches_end = not branches
        for branch in branches:
            found, goes_on, by_branch = _run(branch, constants, decided or by_setting)
            answers += found
            reaches_end = reaches_end or goes_on
            decided = decided or (by_branch and len(branches) == 1)
        if not reaches_end:
            return answers, False, decided
    return answers, True, decided


def _branches(node: ast.stmt, constants: Constants) -> tuple[list[list[ast.stmt]], bool]:
    """Bodies of which one runs, and whether a setting chose what is left; none for a plain statement."""
    if isinstance(node, ast.If):
        truth = _truth(node.test, constants)
        if truth is None:
            return [node.body, node.orelse], False
        return [node.body if truth else node.orelse], True
    if isinstance(node, ast.Match):
        is_setting = SETTINGS.search(ast.unparse(node.subject)) is not None
        last = node.cases[-1]
        if is_setting and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None:
            return [last.body], True
        return [*(case.body for case in node.cases), []], False
    if isinstance(node, ast.Try):
        misses = [h for h in node.handlers if h.type is not None and _is_miss(h.type)]
        asks = any(
            isinstance(part, ast.Subscript) and _is_setting(part.value)
            for s in node.body
            for part in ast.walk(s)
        )
        if misses and asks:
            return [misses[0].body], True
        return [[*node.body, *node.orelse], *(h.body for h in node.handlers)], False
    if isinstance(node, ast.With | ast.AsyncWith):
        return [node.body], False
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        return [node.body, []], False
    return [], False


def _choice(node: ast.expr, constants: Constants) -> tuple[ast.expr, bool]:
    """What is left of `(a, b)[test]`, `{True: a, False: b}[test]` and `a if test else b`."""
    if isinstance(node, ast.IfExp) and (truth := _truth(node.test, constants)) is not None:
        return node.body if truth else node.orelse, True
    if isinstance(node, ast.Subscript) and (truth := _truth(node.slice, constants)) is not None:
        if isinstance(node.value, ast.Tuple | ast.List) and len(node.value.elts) == 2:
            return node.value.elts[int(truth)], True
        if isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == truth:
                    return value, True
    if isinstance(node, ast.Call) and len(node.args) == 2 and _misses(node):
        return node.args[1], True
    return node, False


def _misses(node: ast.Call) -> bool:
    """`table.get(setting, default)` and `next((... if k in settings), default)`, the setting missing."""
    first = node.args[0]
    if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return is_lookup(first) and SETTINGS.search(ast.unparse(first)) is not None
    conditions = [c for g in first.generators for c in g.ifs] if isinstance(first, ast.GeneratorExp) else []
    return (isinstance(node.func, ast.Name) and node.func.id == "next") and any(
        isinstance(c, ast.Compare) and isinstance(c.ops[0], ast.In) and _is_setting(c.comparators[0])
        for c in conditions
    )


def _truth(test: ast.expr, constants: Constants) -> bool | None:
    """Whether a condition on settings holds when they are missing; None where it is about something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, constants)
        return None if inner is None else not inner
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ("bool", "int"):
        return _truth(test.args[0], constants) if len(test.args) == 1 else None
    if not SETTINGS.search(ast.unparse(test)):
        return None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.In | ast.NotIn):
        if isinstance(test.left, ast.Constant) and _is_setting(test.comparators[0]):
            return isinstance(test.ops[0], ast.NotIn)
        return None
    values = values_when_unset(test, constants)
    truths = {bool(value) for value in values} if values else set()
    return next(iter(truths)) if len(truths) == 1 else None


def _is_setting(node: ast.expr) -> bool:
    return not isinstance(node, ast.Call) and SETTINGS.search(ast.unparse(node)) is not None


def _is_miss(node: ast.expr) -> bool:
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(kind, ast.Name) and kind.id in MISSES for kind in kinds)
