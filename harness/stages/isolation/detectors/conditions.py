"""Conditions and assignments that take a feature away."""

import re
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_feature_narrowed"]

NEAR: Final = 60
"""Lines above a condition in which a name's assignment is taken for its meaning."""
LONGEST: Final = 100
"""Characters of an assignment that only names a condition; a longer one, or a call, decides otherwise."""
BOUND: Final = re.compile(r"[0-9][0-9_]{2,}|[A-Z][A-Z0-9_]{2,}|[0-9_]+\s*(<<|\*\*?)\s*[0-9_]+")
"""A constant that something is held below."""
FLIPPED: Final = {"<=": ">", ">=": "<", "<": ">=", ">": "<="}


def find_feature_narrowed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Code that refuses requests on a condition about a feature, or switches the feature off.

    The rule's patterns are regular expressions for the condition, or for the attribute that is switched off.
    A condition that makes the dispatcher decline is none: stock then serves the request.
    """
    words = re.compile("|".join(rule.patterns))
    for text, first, last in source.derive("refusals", lambda s: tuple(_refusals(s))):
        if words.search(text):
            yield from _at(source, first, last)


def _refusals(source: Source) -> Iterator[tuple[str, Node, Node]]:
    """(condition or attribute, first node, last node) of each refusal and each attribute switched off."""
    root = source.root
    if root is None or source.language != "python":
        return
    meanings = _meanings(root)
    for kind in ("if_statement", "elif_clause"):
        for node in root.find_all(kind=kind):
            condition, body = node.field("condition"), node.field("consequence")
            raised = (
                next((c for c in body.named_children() if c.kind() == "raise_statement"), None)
                if body
                else None
            )
            if condition is not None and raised is not None:
                yield _with_meanings(condition, meanings), node, raised
    for node in root.find_all(kind="assert_statement"):
        condition = node.child(1)
        if condition is not None and not _says_what_it_is(condition):
            yield _with_meanings(condition, meanings), node, node
            if re.search(r"model_len|context|max_seq", condition.text()):
                yield re.sub(r"[<>]=?", lambda m: FLIPPED[m.group()], condition.text()), node, node
    for node in root.find_all(kind="assignment"):
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            continue
        if left.kind() == "attribute" and right.text() in ("False", "None", "0", "0.0"):
            yield left.text(), node, node
        if re.match(r"min\(.*\b([0-9]{3,}|[A-Z][A-Z_]{2,})\b", right.text(), re.DOTALL):
            yield f"{left.text()} is capped", node, node
    for node in root.find_all(pattern="min($$$PARTS)") if "min(" in (source.after or "") else ():
        parts = [part.text() for part in node.field("arguments").named_children()]
        if any(map(BOUND.fullmatch, parts)):
            yield from ((f"{part.rpartition('.')[2]} is capped", node, node) for part in parts)


def _meanings(root: Node) -> dict[str, list[tuple[int, str]]]:
    """(line, expression) of each plain assignment by its name."""
    found: dict[str, list[tuple[int, str]]] = {}
    for node in root.find_all(kind="assignment"):
        left, right = node.field("left"), node.field("right")
        if left is None or right is None or left.kind() != "identifier":
            continue
        if len(right.text()) <= LONGEST and "(" not in right.text():
            found.setdefault(left.text(), []).append((left.range().start.line, right.text()))
    return found


def _with_meanings(condition: Node, meanings: dict[str, list[tuple[int, str]]]) -> str:
    """The condition, and what its names were assigned shortly before."""
    text, line = re.sub(r"#[^\n]*", "", condition.text()), condition.range().start.line
    told = [
        meaning
        for name in dict.fromkeys(re.findall(r"(?<![.\w])[A-Za-z_]\w*(?![\w(.\[])", text))
        for place, meaning in meanings.get(name, ())
        if 0 < line - place <= NEAR
    ]
    return "\n".join([text, *told])


def _says_what_it_is(condition: Node) -> bool:
    """Whether an assertion tells a type checker what is there, which refuses nobody."""
    return re.fullmatch(r"[\w.\[\]]+ is not None|isinstance\(.*\)", condition.text(), re.DOTALL) is not None


def _at(source: Source, first: Node, last: Node) -> Iterator[Match]:
    line = source.first_added(first.range().start.line + 1, last.range().end.line + 1)
    if line is not None:
        yield Match(line, source.lines[line - 1].strip())
