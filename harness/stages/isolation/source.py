"""One changed file as the detectors read it.

Invariant: `added` holds the lines of `after` that the change is responsible for. A file that was copied, or
moved from another zone, is new where it now lies, so that all its lines are.
"""

import ast
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, Protocol, TypeVar, cast, runtime_checkable

from ast_grep_py import SgRoot

from harness.domain.change import ChangedFile, FileKind
from harness.domain.policy import ZoneName

__all__ = ["CODE_SUFFIXES", "Language", "Node", "Source", "language_of"]

Node = Any
"""An `ast_grep_py.SgNode`."""
Language = Literal["python", "cpp", "cuda", "other"]
SUFFIXES: Final[dict[str, Language]] = {
    ".py": "python", ".pyi": "python", ".pyx": "python",
    ".cpp": "cpp", ".cc": "cpp", ".cxx": "cpp", ".c": "cpp", ".h": "cpp", ".hpp": "cpp", ".inl": "cpp",
    ".cu": "cuda", ".cuh": "cuda", ".hip": "cuda",
}  # fmt: skip
CODE_SUFFIXES: Final = (
    *SUFFIXES,
    ".rs",
    ".sh",
    ".js",
    ".ts",
    ".cmake",
    ".toml",
    ".cfg",
    ".ini",
    ".yaml",
    ".yml",
    ".j2",
)
GRAMMARS: Final = {
    "python": "python",
    "cpp": "cpp",
    "cuda": "cpp",
}  # CUDA's `<<<` parses as an error node in place
MAX_PARSED: Final = 2 * 2**20
MAX_LINE: Final = 20_000
MAX_DEPTH: Final = 400
DEEP_FROM: Final = 64 * 2**10
"""Bytes from which nesting is measured first: below, even one statement cannot take long."""
NESTING: Final = {
    "python": (
        "attribute", "call", "subscript", "binary_operator", "unary_operator", "not_operator", "lambda",
        "parenthesized_expression", "conditional_expression", "comparison_operator", "boolean_operator",
        "list", "tuple",
    ),
    "cpp": (
        "field_expression", "call_expression", "subscript_expression", "binary_expression",
        "unary_expression", "parenthesized_expression", "conditional_expression", "initializer_list",
        "compound_statement", "if_statement", "assignment_expression",
    ),
}  # fmt: skip
TREES: Final = ("root", "old_root", "module")
T = TypeVar("T")


def language_of(path: str) -> Language:
    """Language by suffix."""
    dot = path.rfind(".")
    return SUFFIXES.get(path[dot:].lower(), "other") if dot > path.rfind("/") else "other"


@runtime_checkable
class Closes(Protocol):
    """Something derived from a file that refers to itself."""

    def close(self) -> None:
        """Let go of it."""
        ...


@dataclass
class Source:
    """A changed file with its text at both sides, where it is text."""

    file: ChangedFile
    zone: ZoneName
    old_zone: ZoneName
    before: str | None
    after: str | None
    """None for anything but text, and for a deleted file."""
    content: bytes | None = None
    """Bytes at head; None where there are none or too many."""
    given_up: str | None = None
    """Why a detector could not follow the code to its end."""
    _derived: dict[str, object] = field(default_factory=dict)

    def derive(self, name: str, make: Callable[["Source"], T]) -> T:
        """What `make` gives for this file, made once; several rules ask for the same tables."""
        if name not in self._derived:
            self._derived[name] = make(self)
        return cast("T", self._derived[name])

    def made(self, name: str) -> object:
        """What was derived under a name; None where nothing was yet."""
        return self._derived.get(name)

    def let_go(self) -> None:
        """Forget syntax trees and what was derived from them; whoever asks again has them made again."""
        for held in self._derived.values():
            if isinstance(held, Closes):
                held.close()
        self._derived.clear()
        for name in TREES:
            self.__dict__.pop(name, None)

    @property
    def path(self) -> str:
        """Path at head."""
        return self.file.path

    @cached_property
    def language(self) -> Language:
        """Language by suffix."""
        return language_of(self.file.path)

    @property
    def is_new_here(self) -> bool:
        """Whether every line is the change's own."""
        return self.file.status in ("added", "copied") or self.old_zone != self.zone

    @cached_property
    def added(self) -> frozenset[int]:
        """Lines at head that the change is responsible for, from 1."""
        if self.after is None:
            return frozenset()
        if self.is_new_here:
            return frozenset(range(1, len(self.lines) + 1))
        return frozenset(number for hunk in self.file.hunks for number, _ in hunk.added)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Lines at head; `\\n` alone separates them, as in git."""
        return tuple((self.after or "").split("\n"))

    def first_added(self, start: int, end: int) -> int | None:
        """First line of the change from `start` to `end`, both included."""
        return next((line for line in range(start, end + 1) if line in self.added), None)

    @property
    def is_readable(self) -> bool:
        """Whether a syntax tree can be made in bounded time."""
        return self.unreadable_why is None

    @property
    def unreadable_why(self) -> str | None:
        """Why there is no syntax tree where one is wanted; None where nothing is wrong."""
        if self.after is None or self.language == "other":
            return None
        if self._problem is None and self.language == "python" and self.module is None:
            return None if self.path.endswith(".pyx") else self._unparsed
        return self._problem or self.given_up

    @property
    def _unparsed(self) -> str:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"no code that Python {here} parses; if a newer one does, judge with that one"

    @cached_property
    def _problem(self) -> str | None:
        text = self.after or ""
        if len(text) > MAX_PARSED:
            return "too large"
        if max(map(len, self.lines)) > MAX_LINE:
            return "a line too long"
        grammar = GRAMMARS[self.language]
        if len(text) > DEEP_FROM and _depth(SgRoot(text, grammar).root(), grammar) > MAX_DEPTH:
            return "nested too deeply"
        return None

    @cached_property
    def root(self) -> Node | None:
        """Syntax tree at head; None where there is none."""
        if self.after is None or self.language == "other" or self._problem is not None:
            return None
        return SgRoot(self.after, GRAMMARS[self.language]).root()

    @cached_property
    def module(self) -> ast.Module | None:
        """The file as this interpreter parses it; None for another language, or what it cannot parse."""
        if self.after is None or self.language != "python" or self._problem is not None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an odd escape in somebody's string is no message of ours
                return ast.parse(self.after)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    @cached_property
    def old_root(self) -> Node | None:
        """Syntax tree at base; None where there is none."""
        if self.before is None or self.language == "other" or len(self.before) > MAX_PARSED:
            return None
        return SgRoot(self.before, GRAMMARS[self.language]).root()

    @property
    def is_text(self) -> bool:
        """Whether there is text at head."""
        return self.after is not None and self.file.kind is FileKind.TEXT


def _depth(root: Node, grammar: str) -> int:
    """Deepest nesting of expressions, from the ranges of a preorder walk."""
    open_ends: list[int] = []
    deepest = 0
    for node in root.find_all({"rule": {"any": [{"kind": kind} for kind in NESTING[grammar]]}}):
        place = node.range()
        while open_ends and open_ends[-1] <= place.start.index:
            open_ends.pop()
        open_ends.append(place.end.index)
        deepest = max(deepest, len(open_ends))
    return deepest
