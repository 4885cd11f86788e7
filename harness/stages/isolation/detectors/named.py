"""Things by the full name under which they were imported, however the file calls them or hands them on."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.changes import Called, Changed, resolved_calls, writes_of
from harness.stages.isolation.flow import flow_of
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_named", "find_step_tensor_written"]

PLAIN: Final = re.compile(r"(\w+)(\.\w+_)?(\[.*)?", re.DOTALL)
"""A write to what a name stands for, and not to an attribute of it."""


def find_named(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Calls, decorators and values handed on whose full name any pattern matches whole."""
    if source.language != "python":
        return
    wanted = _expression(rule)
    by_name = source.derive("calls by name", lambda s: _by_name(resolved_calls(s)))
    seen: set[int] = set()
    for name in sorted(name for name in by_name if wanted.fullmatch(name)):
        for call in by_name[name]:
            line = source.first_added(call.first, call.last)
            is_allowed = any(re.fullmatch(allowed, f"{name}({call.argument})") for allowed in rule.allow)
            if line is not None and line not in seen and not is_allowed:
                seen.add(line)
                yield Match(line, source.lines[line - 1].strip(), f"uses {name}")


def find_step_tensor_written(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Buffers that the engine prepares for a step and that are written in place, through whatever view."""
    wanted = _expression(rule)
    seen: set[int] = set()
    for write in writes_of(source) if source.language == "python" else ():
        names = sorted(o.dotted for o in write.origins if o.kind != "import")
        hits = [name for name in names if wanted.search(name)]
        line = source.first_added(write.first, write.last) if hits else None
        if line is not None and line not in seen and not _is_made_just_before(source, write, wanted):
            seen.add(line)
            yield Match(line, source.lines[line - 1].strip(), f"writes {hits[0]} in place")


def _is_made_just_before(source: Source, write: Changed, wanted: re.Pattern[str]) -> bool:
    """Whether the name that is written was given something else above it in the same block, so that what
    other branches give it does not count.
    """
    name, flow = PLAIN.fullmatch(write.text), flow_of(source)
    if name is None or flow is None or source.module is None:
        return False
    for block in (b for n in ast.walk(source.module) for b in _blocks(n)):
        place = next((n for n, statement in enumerate(block) if statement.lineno == write.first), 0)
        for statement in reversed(block[:place]):
            if any(part.id == name[1] for part in _bound_in(statement)):
                scope = next((scope for node, scope in flow.statements if node is statement), None)
                if not isinstance(statement, ast.Assign) or scope is None:
                    return False
                return not any(wanted.search(o.dotted) for o in flow.origins(statement.value, scope))
    return False


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for part in ("body", "orelse", "finalbody"):
        block = getattr(node, part, None)
        if isinstance(block, list):
            yield block


def _bound_in(statement: ast.stmt) -> Iterator[ast.Name]:
    return (n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _by_name(calls: tuple[Called, ...]) -> dict[str, list[Called]]:
    found: dict[str, list[Called]] = {}
    for call in calls:
        for name in call.names:
            found.setdefault(name.removeprefix("builtins."), []).append(call)
    return found


@lru_cache(maxsize=512)
def _expression(rule: Rule) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in rule.patterns) or r"(?!)")
