"""Tests that were deleted or made easier to pass."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from harness.domain.policy import Rule
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_assertions_gone", "find_skip_added", "find_test_removed", "find_tolerance_widened"]

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
    elsewhere = "\n".join(s.after or "" for s in around.sources.values())
    for name in old:
        if name not in new and not re.search(rf"def {name}\b", elsewhere):
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
    """Skips on added lines of test files that existed before."""
    if source.is_new_here:
        return
    for hunk in source.file.hunks:
        removed = sum(1 for _, text in hunk.removed if _skips(rule, text))
        for line, text in hunk.added:
            if _skips(rule, text):
                removed -= 1
                if removed < 0:
                    yield Match(line, text.strip())


def _skips(rule: Rule, text: str) -> bool:
    return any(re.search(pattern, text) for pattern in rule.patterns)


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
