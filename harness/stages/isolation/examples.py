"""A rule tried on its own examples: the same code path that judges a change, over planted files.

Example paths lie in a tree of their own, so that a rule can be tried whatever repository is judged. A rule
that misses its planted violation cannot be trusted to have found none.
"""

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from harness.domain.change import ChangedFile, FileKind, Hunk
from harness.domain.claim import Switch
from harness.domain.policy import Example, Rule, Zone, ZoneMap
from harness.stages.isolation.detectors import DETECTORS
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["EXAMPLE_TREE", "EXAMPLE_ZONES", "Trial", "try_example", "try_rule"]

EXAMPLE_ZONES: Final = ZoneMap(
    name="examples",
    repository="examples",
    zones=tuple(
        Zone(name=name, globs=globs, why="examples")  # type: ignore[arg-type]  # names are checked by the record
        for name, globs in (
            ("policy", ("/policies/**",)),
            ("ci", ("/.ci/**", "/.github/**")),
            ("tests", ("/tests/**",)),
            ("docs", ("*.md", "/docs/**")),
            ("benchmarks", ("/benchmarks/**",)),
            ("model_code", ("/model/**",)),
            ("other_models", ("/other/**",)),
            ("shared_core", ("/shared/**",)),
            ("harness", ("/judge/**",)),
            ("build", ("/pyproject.toml", "/setup.py", "/requirements*.txt", "/CMakeLists.txt")),
        )
    ),
)
EXAMPLE_TREE: Final = {
    "model/__init__.py": "",
    "model/decode.py": "def step(): ...\n",
    "shared/__init__.py": "",
    "shared/engine.py": (
        "class Scheduler:\n    limit = 4\n\n    def schedule(self): ...\n\n    def _admit(self, it): ...\n"
    ),
    "shared/config.py": "class EngineConfig:\n    block_size: int = 16\n",
}
"""Files beside every example."""
EXAMPLE_SWITCH: Final = Switch(name="decode_backend", on="latency_specialized", off="auto", default="auto")
MAX_EXAMPLE_BYTES: Final = 4096
"""The giant-file limit for examples, so that they stay short."""


class Trial(NamedTuple):
    """One example and what the rule made of it."""

    rule: str
    example: str
    expected: bool
    found: bool
    line: int | None
    """Line of the first match; None where there is none, or it has no line."""
    wanted_line: int | None

    @property
    def is_right(self) -> bool:
        """Whether the rule did as the example says."""
        return self.found == self.expected and self.wanted_line in (None, self.line)


@lru_cache(maxsize=512)
def try_rule(rule: Rule) -> tuple[Trial, ...]:
    """Every example of a rule; tried once in a process, as neither rule nor code changes in it."""
    return tuple(_try(rule, example) for example in rule.examples)


def _try(rule: Rule, example: Example) -> Trial:
    matches = try_example(rule, example)
    line = matches[0].line if matches else None
    return Trial(rule.id, example.name, example.matches, bool(matches), line, example.line)


def try_example(rule: Rule, example: Example) -> tuple[Match, ...]:
    """What a rule finds in an example, model code having changed as well."""
    tree = {**EXAMPLE_TREE, example.path: example.after}
    zones = ZoneIndex(EXAMPLE_ZONES, frozenset(tree))
    source = _source(example, zones)
    around = Surroundings(
        zones=zones,
        changed_zones=frozenset((source.zone, "model_code")),
        sources={source.path: source},
        read_head=lambda path: tree[path].encode() if path in tree else None,
        switch=EXAMPLE_SWITCH,
        functions=frozenset(re.findall(r"\bdef (\w+)", source.after or "")),
        max_file_bytes=MAX_EXAMPLE_BYTES,
    )
    if rule.zones and source.zone not in rule.zones:
        return ()
    return tuple(sorted(DETECTORS[rule.detector](rule, source, around), key=lambda match: match.line or 0))


def _source(example: Example, zones: ZoneIndex) -> Source:
    content = example.after.encode(example.encoding)
    is_deleted = example.mode == "000000"
    kind = {"120000": FileKind.SYMLINK, "160000": FileKind.SUBMODULE}.get(example.mode, FileKind.TEXT)
    if b"\0" in content:
        kind = FileKind.BINARY
    elif example.after.startswith("version https://git-lfs"):
        kind = FileKind.LFS_POINTER
    elif not _is_utf8(content):
        kind = FileKind.NOT_UTF8
    is_text = kind is FileKind.TEXT
    hunks = tuple(_hunks(example.before, example.after)) if is_text else ()
    zone = zones.zone_of(example.path)
    return Source(
        file=ChangedFile(
            path=example.path,
            status=_status(example),
            kind=kind,
            old_mode="100644" if example.before else None,
            new_mode=None if is_deleted else example.mode,
            added_lines=sum(len(hunk.added) for hunk in hunks),
            removed_lines=sum(len(hunk.removed) for hunk in hunks),
            hunks=hunks,
        ),
        zone=zone,
        old_zone=zone,
        before=example.before or None,
        after=example.after if is_text and not is_deleted else None,
        content=None if is_deleted else content,
    )


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _status(example: Example) -> Literal["added", "modified", "deleted", "type_changed"]:
    """As git says it: a plain file that became a link or a submodule changed its type."""
    if example.mode == "000000":
        return "deleted"
    if not example.before:
        return "added"
    return "type_changed" if example.mode in ("120000", "160000") else "modified"


def _hunks(before: str, after: str) -> Iterator[Hunk]:
    """Changed blocks, as a diff without context lines has them."""
    old, new = before.split("\n"), after.split("\n")
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield Hunk(
                base_start=a + 1,
                head_start=c + 1,
                removed=tuple((n + 1, old[n]) for n in range(a, b)),
                added=tuple((n + 1, new[n]) for n in range(c, d)),
            )
