"""Python code that writes, moves or removes files, by whatever function or method it does so.

The rule's patterns are full names of functions, and names of methods with a dot in front, which count
wherever they are taken, called or not, as only files have them. What opens a file is judged by its mode: a
plain string that only reads is nobody's harm.
"""

import ast
import re
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.flow import Flow, flow_of
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_file_written"]

OPENERS: Final = re.compile(
    r"(builtins|io|codecs|gzip|bz2|lzma|zipfile|tarfile|os)\.(open|ZipFile|GzipFile|fdopen)"
)
"""Their second argument is a mode."""
MODE: Final = re.compile(r"[rwaxbt+U]{1,4}(:\w*)?")
WRITES: Final = re.compile(r"[wax+]")


def find_file_written(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Calls and methods that write files, on added lines."""
    flow = flow_of(source)
    if flow is None:
        return
    whole = re.compile("|".join(p for p in rule.patterns if not p.startswith(".")) or r"(?!)")
    methods = {p.removeprefix(".") for p in rule.patterns if p.startswith(".")}
    seen: set[int] = set()
    for node, words in _found(flow, whole, methods):
        line = source.first_added(node.lineno, node.end_lineno or node.lineno)
        is_allowed = any(re.fullmatch(expression, ast.unparse(node)) for expression in rule.allow)
        if line is not None and line not in seen and not is_allowed:
            seen.add(line)
            yield Match(line, source.lines[line - 1].strip(), words)


def _found(flow: Flow, whole: "re.Pattern[str]", methods: set[str]) -> Iterator[tuple[ast.expr, str]]:
    for call, scope in flow.calls:
        names = {name.removeprefix("builtins.") for name in flow.names(call.func, scope)}
        hits = sorted(name for name in names if whole.fullmatch(name))
        if hits:
            yield call, f"calls {hits[0]}"
        elif _opens_to_write(call, flow.names(call.func, scope)):
            yield call, "opens a file to write"
        elif _taken_by_text(call) in methods and "getattr" in names:
            yield call, f"takes {_taken_by_text(call)} by its name as text"
    for node in flow.read_attributes:
        if node.attr in methods:
            yield node, f"takes {node.attr}"


def _opens_to_write(call: ast.Call, names: frozenset[str]) -> bool:
    """Whether a call opens a file in a mode that writes, or in one that is computed."""
    place = 1 if any(map(OPENERS.fullmatch, names)) else None
    if place is None and isinstance(call.func, ast.Attribute) and call.func.attr == "open" and not names:
        place = 0  # a method of a path
    if place is None:
        return False
    given = next((k.value for k in call.keywords if k.arg == "mode"), None)
    mode = given or (call.args[place] if len(call.args) > place else None)
    if mode is None:
        return any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
    if not isinstance(mode, ast.Constant):
        return place == 1 or given is not None
    return isinstance(mode.value, str) and bool(MODE.fullmatch(mode.value) and WRITES.search(mode.value))


def _taken_by_text(call: ast.Call) -> str:
    name = call.args[1] if len(call.args) > 1 else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
