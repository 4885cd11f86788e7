"""C++ and CUDA preprocessing that changes what other code means."""

import re
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_macro_redefined"]

DIRECTIVE: Final = re.compile(r"^\s*#\s*(define|undef)\s+(\w+)")
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
