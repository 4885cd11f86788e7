"""C++ and CUDA preprocessing that changes what other code means, and launches that name no stream."""

import re
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_launch_without_stream", "find_macro_redefined"]

DIRECTIVE: Final = re.compile(r"^\s*#\s*(define|undef)\s+(\w+)")
LAUNCH_ARGUMENTS: Final = 4
"""Grid, block, shared memory and stream."""
LAUNCH: Final = re.compile(r"<<<(?P<given>[^;{}]{1,2000}?)>>>")
COMMENT: Final = re.compile(r"//[^\n]*")
KEYWORDS: Final = frozenset(
    (
        "private",
        "protected",
        "public",
        "class",
        "struct",
        "inline",
        "static",
        "const",
        "if",
        "while",
        "for",
        "return",
    )
)


def find_macro_redefined(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Keywords that are defined away, names of others (the rule's patterns) that are defined, and macros that
    are undefined without having been defined in the same file.
    """
    if source.language not in ("cpp", "cuda"):
        return
    own: set[str] = set()
    for number, text in enumerate(source.lines, start=1):
        directive = DIRECTIVE.match(text)
        if directive is None:
            continue
        word, name = directive.groups()
        is_foreign = name in KEYWORDS or any(re.fullmatch(pattern, name) for pattern in rule.patterns)
        if word == "define" and not is_foreign:
            own.add(name)
        elif number in source.added and name not in own:
            yield Match(number, text.strip(), f"{name} is not this file's own")


def find_launch_without_stream(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Kernels launched with less than four arguments between the angle brackets: on the default stream."""
    if source.language not in ("cpp", "cuda") or "<<<" not in (source.after or ""):
        return
    text = COMMENT.sub(lambda found: " " * len(found.group()), source.after or "")
    for launch in LAUNCH.finditer(text):
        first = text.count("\n", 0, launch.start()) + 1
        line = source.first_added(first, first + launch.group().count("\n"))
        if line is not None and _arguments(launch["given"]) < LAUNCH_ARGUMENTS:
            yield Match(line, source.lines[line - 1].strip(), "is launched on the default stream")


def _arguments(text: str) -> int:
    """Arguments at the top level of a list; a pack that is expanded may be any number."""
    depth, count = 0, 1
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        count += character == "," and depth == 0
    return LAUNCH_ARGUMENTS if "..." in text else count
