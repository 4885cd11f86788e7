"""Rules whose patterns say all: ast-grep over the syntax tree, and regular expressions over added lines."""

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

from harness.documents import parse_yaml
from harness.domain.errors import InputError
from harness.domain.policy import Rule
from harness.stages.isolation.changes import Called, resolved_calls
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_ast_grep", "find_path", "find_regex"]

WHOLE_CALL = re.compile(r"([A-Za-z_]\w*(?:\.(?:\w+|\$[A-Z]+))*)\((\$[A-Z]+(, )?)?(\$\$\$[A-Z]+)?\)")
"""A code pattern that says what is called and leaves the arguments open."""
METHOD_CALL = re.compile(r"\$[A-Z]+\.(\w+)\(")
LITERAL_GETATTR = re.compile(r"""getattr\([^()]{1,200},\s*["'](\w+)["']""")
_WORD = re.compile(r"[A-Za-z_]\w*")
MAX_SEARCHED_PARTS = 2
VALUE = "VALUE"
"""The metavariable that a rule's `allow` is matched against."""


def find_ast_grep(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Matches of any pattern that touch an added line."""
    if source.after is None or source.language == "other":
        return
    seen: set[int] = set()
    is_cpp = source.language in ("cpp", "cuda")
    for searched, patterns in _searches(rule, source):
        for config in _configs(rule, is_cpp, patterns):
            for node in _find_all(rule, searched, config):
                place = node.range()
                line = source.first_added(place.start.line + 1, place.end.line + 1)
                if line is None or line in seen or _is_allowed(rule, node):
                    continue
                seen.add(line)
                yield Match(line, source.lines[line - 1].strip())
    for line in _methods_by_text(rule, source):
        if line in source.added and line not in seen:
            seen.add(line)
            yield Match(line, source.lines[line - 1].strip(), "takes a method by its name as text")
    for call in _calls_by_another_name(rule, source):
        line = source.first_added(call.first, call.last)
        if line is not None and line not in seen:
            seen.add(line)
            yield Match(line, source.lines[line - 1].strip(), f"calls {sorted(call.names)[0]}")


def find_regex(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Added lines on which any pattern is found."""
    text = source.derive("added text", lambda s: "\n".join(s.lines[n - 1] for n in sorted(s.added)))
    expressions = [_compiled(p) for p in rule.patterns if _must_hold(p) in text and _in_lines(p).search(text)]
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


def _calls_by_another_name(rule: Rule, source: Source) -> Iterator[Called]:
    """Calls that a pattern names in full, and the file by an alias."""
    wanted = _full_names(rule)
    if wanted.whole is None or source.language != "python":
        return
    by_word = source.derive("calls by word", lambda s: _by_word(resolved_calls(s)))
    for call in dict.fromkeys(call for word in wanted.words & by_word.keys() for call in by_word[word]):
        names = [name.removeprefix("builtins.") for name in call.names]
        texts = (call.argument.strip("\"' "), *(f"{name}({call.argument})" for name in names))
        expression = wanted.exact if call.is_handed else wanted.whole
        if any(map(expression.fullmatch, names)) and not any(_allows(rule, text) for text in texts):
            yield call


def _methods_by_text(rule: Rule, source: Source) -> Iterator[int]:
    """Lines with `getattr(x, "name")` for a method that a pattern names."""
    methods = {found[1] for p in rule.patterns if (found := METHOD_CALL.match(p)) is not None}
    text = source.after or ""
    if methods and source.language == "python" and "getattr" in text:
        for found in LITERAL_GETATTR.finditer(text):
            if found[1] in methods:
                yield text.count("\n", 0, found.start()) + 1


def _searches(rule: Rule, source: Source) -> list[tuple[Node, frozenset[str]]]:
    """What to search for which patterns: a few parts, or the whole tree at once, as every search reads the
    patterns anew. The tree is made where there is something to search for.
    """
    parts = source.derive("parts", _parts)
    whole = source.derive("all parts", lambda s: _all_of(parts))
    likely = [p for p in rule.patterns if _may_match(p, whole)]
    asked = [(part, frozenset(p for p in likely if _may_match(p, part))) for part in parts if likely]
    asked = [(part, patterns) for part, patterns in asked if patterns]
    if not asked or (root := source.root) is None:
        return []
    if len(asked) <= MAX_SEARCHED_PARTS:
        return [(node, patterns) for part, patterns in asked for node in _nodes_of(part, root)]
    return [(root, frozenset().union(*(patterns for _, patterns in asked)))]


class _Part(NamedTuple):
    """A statement of the file's top level that touches an added line."""

    first: int
    last: int
    text: str
    words: frozenset[str]


def _parts(source: Source) -> tuple[_Part, ...]:
    """What can hold a match: searching these by the words in them spares most of a tree. The whole file where
    it is not of statements, as a parser's error leaves it.
    """
    found = []
    for first, last in _places(source):
        if source.first_added(first, last) is not None:
            text = "\n".join(source.lines[first - 1 : last])
            found.append(_Part(first, last, text, frozenset(_WORD.findall(text))))
    return tuple(found)


def _places(source: Source) -> list[tuple[int, int]]:
    """First and last line of each statement of the top level."""
    if source.module is not None:
        return [
            (
                min((node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ())))),
                node.end_lineno or 0,
            )
            for node in source.module.body
        ]
    if (root := source.root) is None:
        return []
    nodes = list(root.children())
    if any(node.kind() == "ERROR" for node in nodes):
        return [(1, len(source.lines))]
    return [(place.start.line + 1, place.end.line + 1) for place in (node.range() for node in nodes)]


def _nodes_of(part: _Part, root: Node) -> list[Node]:
    """Nodes of the top level in a part; the whole tree where its parser made other statements of the file."""
    nodes = list(root.children())
    if any(node.kind() == "ERROR" for node in nodes):
        return [root]
    places = [(node, node.range()) for node in nodes]
    return [n for n, at in places if at.start.line < part.last and at.end.line + 1 >= part.first]


def _all_of(parts: tuple[_Part, ...]) -> _Part:
    """The parts as one: what is not in it is in none."""
    words = frozenset().union(*(part.words for part in parts))
    return _Part(0, 0, "\n".join(part.text for part in parts), words)


class _Wanted(NamedTuple):
    """Names that a rule's patterns call with whatever arguments."""

    whole: re.Pattern[str] | None
    exact: re.Pattern[str]
    """The same without what may stand before, for what is handed on: many a type is called `Thread`."""
    words: frozenset[str]
    """One word of each that its calls must have: the last, or the one before a last that is open."""


def _by_word(calls: tuple[Called, ...]) -> dict[str, list[Called]]:
    """Calls by each of the last two words of their names."""
    found: dict[str, list[Called]] = {}
    for call in calls:
        for word in {word for name in call.names for word in name.rsplit(".", 2)[-2:]}:
            found.setdefault(word, []).append(call)
    return found


@lru_cache(maxsize=512)
def _full_names(rule: Rule) -> _Wanted:
    found = [whole[1] for p in rule.patterns if (whole := WHOLE_CALL.fullmatch(p)) is not None]
    exact = [re.sub(r"\\\$[A-Z]+", r"\\w+", re.escape(name)) for name in found]
    forms = "|".join(
        (r"(?:[\w.]+\.)?" if "." in name or name[0].isupper() else "") + form
        for name, form in zip(found, exact, strict=True)
    )
    words = (name.split(".") for name in found)
    return _Wanted(
        re.compile(forms) if forms else None,
        re.compile("|".join(exact)),
        frozenset(w[-2] if w[-1].startswith("$") and len(w) > 1 else w[-1] for w in words),
    )


def _find_all(rule: Rule, root: Node, config: Any) -> list[Node]:
    try:
        return list(root.find_all(config))
    except RuntimeError as error:  # what ast-grep raises for a pattern that it cannot use
        reason = "; ".join(
            line.strip() for line in str(error).split("\n\nStack")[0].splitlines() if line.strip()
        )
        raise InputError(
            f"rule {rule.id}: ast-grep refuses {config['rule']!r} ({reason}); correct the pattern"
        ) from error


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _must_hold(pattern: str) -> str:
    """Text that every match holds, which is found much faster than a match."""
    return "" if _compiled(pattern).flags & (re.IGNORECASE | re.VERBOSE) else longest_literal(pattern)


@cache
def _in_lines(pattern: str) -> re.Pattern[str]:
    """The same with `^` and `$` at every line: it finds at least what the lines hold one by one."""
    return re.compile(pattern, re.MULTILINE)


@lru_cache(maxsize=4096)
def _configs(rule: Rule, is_cpp: bool, patterns: frozenset[str]) -> tuple[Any, ...]:
    """What ast-grep is asked: all code patterns at once, in one walk of the tree, then each whole rule."""
    plain = [p for p in rule.patterns if p in patterns and not p.startswith("rule:")]
    # `f($A, $$$REST)` alone would want a comma after the first argument.
    forms = [form for p in plain for form in (p, re.sub(r", \$\$\$[A-Z]+\)$", ")", p))]
    atoms = [_atom(form, is_cpp) for form in dict.fromkeys(forms)]
    whole = [_whole(p, rule.id) for p in rule.patterns if p in patterns and p.startswith("rule:")]
    return (*([{"rule": {"any": atoms}}] if atoms else []), *whole)


@cache
def _whole(pattern: str, rule: str) -> Any:
    """The ast-grep rule in a pattern that starts with `rule:`."""
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


def _may_match(pattern: str, part: _Part) -> bool:
    """Whether the text holds what any match must contain; it spares most parts the search."""
    needed, expressions = _needed(pattern)
    return needed <= part.words and all(
        literal in part.text and e.search(part.text) for literal, e in expressions
    )


@cache
def _needed(pattern: str) -> tuple[frozenset[str], tuple[tuple[str, re.Pattern[str]], ...]]:
    """Words, and expressions without their anchors, that the text of any match contains; each expression
    with a run of characters that it holds, which is found much faster.
    """
    if not pattern.startswith("rule:"):
        return frozenset(re.findall(r"(?<![\w$])[A-Za-z_]\w*", pattern)), ()
    words: set[str] = set()
    expressions: list[str] = []
    config = parse_yaml(pattern, "pattern")
    _collect(config.get("rule") if isinstance(config, dict) else None, words, expressions)
    return frozenset(words), tuple((longest_literal(e), re.compile(e)) for e in expressions)


def longest_literal(expression: str) -> str:
    """The longest run of characters that every match of an expression without flags holds; may be empty."""
    best = run = ""
    for kind, value in re._parser.parse(expression):  # type: ignore[attr-defined]
        run = run + chr(value) if kind is re._constants.LITERAL else ""  # type: ignore[attr-defined]
        best = max(best, run, key=len)
    return best


def _collect(part: object, words: set[str], expressions: list[str]) -> None:
    """What a conjunction asks for; `any` and `not` ask for nothing in particular."""
    if not isinstance(part, dict):
        return
    for key, value in part.items():
        if key == "pattern" and isinstance(value, str):
            words.update(re.findall(r"(?<![\w$])[A-Za-z_]\w*", value))
        elif key == "regex" and isinstance(value, str) and "(?" not in value:
            # An anchor holds at a node's end, which may be anywhere in the text.
            expressions.append(re.sub(r"(?<![\[\\])\^|(?<!\\)\$", "", value))
        elif key in ("has", "inside"):
            _collect(value, words, expressions)
        elif key == "all" and isinstance(value, list):
            for each in value:
                _collect(each, words, expressions)


def _is_allowed(rule: Rule, node: Node) -> bool:
    if not rule.allow:
        return False
    value = node.get_match(VALUE)
    return _allows(rule, (value.text() if value is not None else node.text()).strip("\"' "))


def _allows(rule: Rule, text: str) -> bool:
    return any(_compiled(expression).fullmatch(text) for expression in rule.allow)
