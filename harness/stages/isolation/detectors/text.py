"""Characters that make a diff read other than it runs."""

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["find_hidden_text", "find_homoglyph", "find_unreadable"]

HIDDEN: Final = re.compile(
    "[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufff9-\ufffb"
    "\U000e0000-\U000e007f\x00-\x08\x0b\x0e-\x1f\x7f\x80-\x84\x86-\x9f]"
)
"""Direction controls, invisible characters, tag characters, and control characters such as escape."""
LATE_MARK: Final = re.compile("(?<!^)\ufeff")
WORD: Final = re.compile(r"[^\W\d_]+")
LOOKALIKES: Final = frozenset(
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf\u03f2\u03f3"
)
"""Greek letters that print as Latin ones. Others, such as those of formulas, are told apart by eye."""


def find_hidden_text(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Added lines, or a path, with characters that do not show or turn the direction."""
    if found := HIDDEN.search(source.path):
        yield Match(None, _escaped(source.path), f"the path holds U+{ord(found.group()):04X}")
    if not (HIDDEN.search(source.after or "") or "\ufeff" in (source.after or "")):
        return
    for line in sorted(source.added):
        text = source.lines[line - 1]
        found = HIDDEN.search(text) or LATE_MARK.search(text)
        if found:
            yield Match(line, _escaped(text.strip()), f"holds U+{ord(found.group()):04X}")


def find_homoglyph(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Words that mix Latin letters with letters of another script that look like them."""
    if (source.after or "").isascii():
        return
    for line in sorted(source.added):
        text = source.lines[line - 1]
        if text.isascii():
            continue
        for word in WORD.findall(text):
            odd = [c for c in word if not c.isascii() and _imitates(c)]
            is_mixed = any(c.isascii() for c in word) or any(_is_styled(c) for c in odd)
            if odd and is_mixed:
                yield Match(
                    line, _escaped(text.strip()), f"{_escaped(word)} holds {unicodedata.name(odd[0], '?')}"
                )
                break


def find_unreadable(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Code of which no syntax tree can be made in bounded time, or that no detector can follow to its end."""
    if source.after is not None and source.added and source.unreadable_why is not None:
        yield Match(min(source.added), source.path, source.unreadable_why)


def _imitates(character: str) -> bool:
    return "CYRILLIC" in unicodedata.name(character, "") or character in LOOKALIKES or _is_styled(character)


def _is_styled(character: str) -> bool:
    """Whether Python reads the character as an ASCII letter (PEP 3131: names are NFKC-normalised)."""
    normal = unicodedata.normalize("NFKC", character)
    name = unicodedata.name(character, "")
    return normal != character and normal.isascii() and ("MATHEMATICAL" in name or "FULLWIDTH" in name)


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
