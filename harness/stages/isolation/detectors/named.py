"""Things by the full name under which they were imported, however the file calls them or hands them on."""

import re
from collections.abc import Iterator
from functools import lru_cache

from harness.domain.policy import Rule
from harness.stages.isolation.changes import Called, resolved_calls, writes_of
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_named", "find_step_tensor_written"]


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
        if line is not None and line not in seen:
            seen.add(line)
            yield Match(line, source.lines[line - 1].strip(), f"writes {hits[0]} in place")


def _by_name(calls: tuple[Called, ...]) -> dict[str, list[Called]]:
    found: dict[str, list[Called]] = {}
    for call in calls:
        for name in call.names:
            found.setdefault(name.removeprefix("builtins."), []).append(call)
    return found


@lru_cache(maxsize=512)
def _expression(rule: Rule) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in rule.patterns) or r"(?!)")
