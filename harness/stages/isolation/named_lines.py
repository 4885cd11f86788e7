"""Which added lines lie in what tests name: nearer to what they execute than an import, and as cheap.

A test that imports a module may use one function of twenty. Counted here are added lines in functions and
classes whose names stand in a test file that imports the module, in those that these name in the same file,
and at the module's own level, which runs when it is imported. A name in a test is no proof of a call, and a
function that only another module calls counts for nothing.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from harness.stages.isolation.source import Source

__all__ = ["count_named_lines", "words_of"]

WITH_ITS_CLASS: Final = re.compile(r"__\w+__|forward")
"""Methods that nobody needs to name: whoever makes or calls the object runs them."""
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class _Unit:
    """A function or class of the module, or a method."""

    name: str
    owner: str
    """The class that a method lies in."""
    lines: frozenset[int]
    words: frozenset[str]


def words_of(text: str) -> frozenset[str]:
    """Every word of a test file, also in its strings, by which a function may be asked for."""
    return frozenset(_WORD.findall(text))


def count_named_lines(source: Source, named: Iterable[str]) -> int:
    """Added lines of a Python file in what `named` reaches within it; 0 where no test names anything."""
    words = set(named)
    if not words or source.module is None:
        return 0
    units = [
        unit for node in source.module.body if isinstance(node, _Definition) for unit in _units(node, source)
    ]
    reached: set[_Unit] = set()
    while fresh := [unit for unit in units if unit not in reached and _is_named(unit, words)]:
        reached.update(fresh)
        words.update(*(unit.words for unit in fresh))
    left_out = frozenset[int]().union(*(unit.lines for unit in units if unit not in reached))
    return len(source.added - left_out)


def _is_named(unit: _Unit, words: set[str]) -> bool:
    if not unit.owner:
        return unit.name in words
    return unit.owner in words and (unit.name in words or WITH_ITS_CLASS.fullmatch(unit.name) is not None)


def _units(node: _Definition, source: Source, owner: str = "") -> list[_Unit]:
    """A definition without the methods in it, and each method."""
    lines = _lines(node)
    methods = [
        unit
        for part in (node.body if isinstance(node, ast.ClassDef) and not owner else ())
        if isinstance(part, _Definition)
        for unit in _units(part, source, node.name)
    ]
    own = lines.difference(*(method.lines for method in methods))
    words = frozenset(word for line in own for word in _WORD.findall(source.lines[line - 1]))
    return [_Unit(node.name, owner, own, words), *methods]


def _lines(node: _Definition) -> frozenset[int]:
    first = min((node.lineno, *(decorator.lineno for decorator in node.decorator_list)))
    return frozenset(range(first, (node.end_lineno or node.lineno) + 1))
