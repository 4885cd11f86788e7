"""Conditions that take a feature away, or select the optimised path."""

import re
from collections.abc import Iterator

from harness.domain.policy import Rule
from harness.stages.isolation.names import string_value
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_feature_narrowed", "find_switch_default"]


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
    for kind in ("if_statement", "elif_clause"):
        for node in root.find_all(kind=kind):
            condition, body = node.field("condition"), node.field("consequence")
            raised = (
                next((c for c in body.named_children() if c.kind() == "raise_statement"), None)
                if body
                else None
            )
            if condition is not None and raised is not None:
                yield condition.text(), node, raised
    for node in root.find_all(kind="assert_statement"):
        condition = node.child(1)
        if condition is not None and not _says_what_it_is(condition):
            yield condition.text(), node, node
    for node in root.find_all(kind="assignment"):
        left, right = node.field("left"), node.field("right")
        if left is None or right is None or left.kind() != "attribute":
            continue
        if right.text() in ("False", "None", "0"):
            yield left.text(), node, node


def _says_what_it_is(condition: Node) -> bool:
    """Whether an assertion tells a type checker what is there, which refuses nobody."""
    return re.fullmatch(r"[\w.\[\]]+ is not None|isinstance\(.*\)", condition.text(), re.DOTALL) is not None


def find_switch_default(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Defaults of the claim's switch that are not its off value."""
    root, switch = source.root, around.switch
    if (
        root is None
        or switch is None
        or source.language != "python"
        or switch.name not in (source.after or "")
    ):
        return
    for node in root.find_all(kind="call"):
        function = node.field("function").text()
        arguments = [a for a in node.field("arguments").named_children() if a.kind() != "comment"]
        is_lookup = function.endswith((".get", "getattr", ".setdefault", ".pop"))
        names = [index for index, a in enumerate(arguments) if string_value(a) == switch.name]
        if is_lookup and names and len(arguments) > names[0] + 1:
            yield from _unless_off(source, node, arguments[names[0] + 1], switch.off)
    for kind in ("default_parameter", "typed_default_parameter", "assignment"):
        for node in root.find_all(kind=kind):
            name = node.field("left" if kind == "assignment" else "name")
            value = node.field("right" if kind == "assignment" else "value")
            is_field = kind != "assignment" or node.field("type") is not None
            if name is not None and value is not None and is_field and name.text() == switch.name:
                yield from _unless_off(source, node, value, switch.off)


def _unless_off(source: Source, node: Node, value: Node, off: str) -> Iterator[Match]:
    literal = string_value(value)
    if literal is not None and literal != off:
        for match in _at(source, node, value):
            yield Match(match.line, match.excerpt, f"the default is {literal!r}, not {off!r}")


def _at(source: Source, first: Node, last: Node) -> Iterator[Match]:
    line = source.first_added(first.range().start.line + 1, last.range().end.line + 1)
    if line is not None:
        yield Match(line, source.lines[line - 1].strip())
