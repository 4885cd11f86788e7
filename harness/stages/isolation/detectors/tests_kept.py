"""Tests that were deleted or made easier to pass."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from harness.domain.policy import Rule
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = [
    "find_assertions_gone", "find_conditional_skip_added", "find_skip_added", "find_test_removed",
    "find_tolerance_widened",
]  # fmt: skip

TOLERANCE: Final = re.compile(
    r"\b(rtol|atol|rel|abs|tol|tolerance|atol_\w+|rtol_\w+)\s*=\s*([0-9][0-9_.eE+-]*)"
)
ASSERTS: Final = re.compile(
    r"\bassert\b|\bassert_\w+\(|\bassert[A-Z]\w*\(|\.raises\(|\bassert_close\(|allclose\("
)


class TestFunction(NamedTuple):
    """One test with its text."""

    line: int
    text: str


def find_test_removed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Tests that no changed file has any more, where their file now has fewer."""
    if source.language != "python":
        return
    old, new = _tests(source.old_root), _tests(source.root)
    if len(new) >= len(old):
        return
    for name in old:
        if name not in around.functions:
            yield Match(None, name, f"{name} is gone and nothing took its place")


def find_assertions_gone(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Tests that checked something at base and check nothing, or less, at head."""
    if source.language != "python":
        return
    old, new = _tests(source.old_root), _tests(source.root)
    for name in old.keys() & new.keys():
        before, after = len(ASSERTS.findall(old[name].text)), len(ASSERTS.findall(new[name].text))
        if before > 0 and after == 0:
            yield Match(new[name].line, name, f"{before} assertions became none")


def find_tolerance_widened(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Added lines that raise a tolerance which the removed lines of the same hunk held lower."""
    for hunk in source.file.hunks:
        before: dict[str, list[float]] = {}
        for _, text in hunk.removed:
            for name, value in _tolerances(text):
                before.setdefault(name, []).append(value)
        for line, text in hunk.added:
            for name, value in _tolerances(text):
                if name in before and value > max(before[name]):
                    yield Match(line, text.strip(), f"{name} rose from {max(before[name]):g} to {value:g}")


def find_skip_added(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Skips on added lines of test files that existed before, outside functions that are new."""
    conditional = _conditional_lines(source.root)
    for match in _skips_added(rule, source):
        if match.line not in conditional:
            yield match


def find_conditional_skip_added(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """The same under an `if`, where some cases are left."""
    conditional = _conditional_lines(source.root)
    for match in _skips_added(rule, source):
        if match.line in conditional:
            yield match


def _skips_added(rule: Rule, source: Source) -> Iterator[Match]:
    if source.is_new_here:
        return
    new = _spans(source.root, _names(source.old_root))
    for hunk in source.file.hunks:
        removed = sum(1 for _, text in hunk.removed if _skips(rule, text))
        for line, text in hunk.added:
            if _skips(rule, text) and not any(start <= line <= end for start, end in new):
                removed -= 1
                if removed < 0:
                    yield Match(line, text.strip())


def _conditional_lines(root: Node | None) -> frozenset[int]:
    """Lines inside the branches of an `if` that lies in a function."""
    lines: set[int] = set()
    for node in root.find_all(kind="if_statement") if root is not None else ():
        if any(above.kind() == "function_definition" for above in node.ancestors()):
            lines.update(range(node.range().start.line + 2, node.range().end.line + 2))
    return frozenset(lines)


def _skips(rule: Rule, text: str) -> bool:
    return any(re.search(pattern, text) for pattern in rule.patterns)


def _names(root: Node | None) -> set[str]:
    functions = root.find_all(kind="function_definition") if root is not None else ()
    return {function.field("name").text() for function in functions}


def _spans(root: Node | None, known: set[str]) -> list[tuple[int, int]]:
    """First and last line of each function that is not known, its decorators included."""
    spans = []
    for function in root.find_all(kind="function_definition") if root is not None else ():
        if function.field("name").text() not in known:
            above = function.parent()
            whole = above if above is not None and above.kind() == "decorated_definition" else function
            spans.append((whole.range().start.line + 1, whole.range().end.line + 1))
    return spans


def _tests(root: Node | None) -> dict[str, TestFunction]:
    if root is None:
        return {}
    return {
        node.field("name").text(): TestFunction(node.range().start.line + 1, node.text())
        for node in root.find_all(kind="function_definition")
        if node.field("name").text().startswith("test")
    }


def _tolerances(text: str) -> Iterator[tuple[str, float]]:
    for name, number in TOLERANCE.findall(text):
        try:
            yield name, float(number.replace("_", ""))
        except ValueError:
            continue
