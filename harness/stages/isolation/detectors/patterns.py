"""Rules whose patterns say all: ast-grep over the syntax tree, and regular expressions over added lines."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from harness.documents import parse_yaml
from harness.domain.errors import InputError
from harness.domain.policy import Rule
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_ast_grep", "find_path", "find_regex"]

VALUE = "VALUE"
"""The metavariable that a rule's `allow` is matched against."""


def find_ast_grep(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Matches of any pattern that touch an added line."""
    root = source.root
    if root is None:
        return
    seen: set[int] = set()
    words = source.derive("words", lambda s: frozenset(re.findall(r"[A-Za-z_]\w*", s.after or "")))
    is_cpp = source.language in ("cpp", "cuda")
    for pattern in rule.patterns:
        if not _literals(pattern) <= words:
            continue
        for node in _find_all(rule, root, pattern, is_cpp):
            place = node.range()
            line = source.first_added(place.start.line + 1, place.end.line + 1)
            if line is None or line in seen or _is_allowed(rule, node):
                continue
            seen.add(line)
            yield Match(line, source.lines[line - 1].strip())


def find_regex(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Added lines on which any pattern is found."""
    text = source.derive("added text", lambda s: "\n".join(s.lines[n - 1] for n in sorted(s.added)))
    expressions = [_compiled(pattern) for pattern in rule.patterns if _in_lines(pattern).search(text)]
    if not expressions:
        return
    for line in sorted(source.added):
        text = source.lines[line - 1]
        hits = [hit for expression in expressions if (hit := expression.search(text)) is not None]
        if any(not _allows(rule, hit.group()) for hit in hits):
            yield Match(line, text.strip())


def find_path(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Added or renamed files whose path any pattern matches."""
    if source.file.status not in ("deleted", "modified") and any(
        _compiled(pattern).search(source.path) for pattern in rule.patterns
    ):
        yield Match(None, source.path)


def _find_all(rule: Rule, root: Node, pattern: str, is_cpp: bool) -> list[Node]:
    try:
        return list(root.find_all(_config(pattern, rule.id, is_cpp)))
    except RuntimeError as error:  # what ast-grep raises for a pattern that it cannot use
        reason = "; ".join(
            line.strip() for line in str(error).split("\n\nStack")[0].splitlines() if line.strip()
        )
        raise InputError(
            f"rule {rule.id}: ast-grep refuses {pattern!r} ({reason}); correct the pattern"
        ) from error


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _in_lines(pattern: str) -> re.Pattern[str]:
    """The same with `^` and `$` at every line: it finds at least what the lines hold one by one."""
    return re.compile(pattern, re.MULTILINE)


@cache
def _config(pattern: str, rule: str, is_cpp: bool) -> Any:
    """What ast-grep is asked: a code pattern, or a whole rule for text that starts with `rule:`."""
    if not pattern.startswith("rule:"):
        # `f($A, $$$REST)` alone would want a comma after the first argument.
        bare = re.sub(r", \$\$\$[A-Z]+\)$", ")", pattern)
        return {"rule": {"any": [_atom(p, is_cpp) for p in dict.fromkeys((pattern, bare))]}}
    config = parse_yaml(pattern, f"rule {rule}")
    if not isinstance(config, dict) or not set(config) <= {"rule", "constraints", "utils"}:
        raise InputError(
            f"rule {rule}: a pattern that starts with `rule:` holds `rule`, `constraints` and `utils` only"
        )
    return config


def _atom(pattern: str, is_cpp: bool) -> dict[str, Any]:
    """A call in C++ needs a statement around it, or it reads as a declaration."""
    if is_cpp and pattern.endswith(")"):
        return {"pattern": {"context": f"auto x = {pattern};", "selector": "call_expression"}}
    return {"pattern": pattern}


@cache
def _literals(pattern: str) -> frozenset[str]:
    """Words that any match of a code pattern must contain; they spare most files the search."""
    if pattern.startswith("rule:"):
        return frozenset()
    return frozenset(re.findall(r"(?<![\w$])[A-Za-z_]\w*", pattern))


def _is_allowed(rule: Rule, node: Node) -> bool:
    if not rule.allow:
        return False
    value = node.get_match(VALUE)
    return _allows(rule, (value.text() if value is not None else node.text()).strip("\"' "))


def _allows(rule: Rule, text: str) -> bool:
    return any(_compiled(expression).fullmatch(text) for expression in rule.allow)
