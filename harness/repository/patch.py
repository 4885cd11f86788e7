"""Patch text of `git diff-tree -p -U0` into hunks."""

import itertools
import re
from collections.abc import Iterator

from unidiff import PatchSet

from harness.domain.change import Hunk

__all__ = ["parse_hunks", "split_patch"]

# With no context lines every line of content starts with `+`, `-` or `\`, and names with odd characters are
# quoted, so this can only be a header.
_HEADER = re.compile(rb"^diff --git ", re.MULTILINE)


def split_patch(patch: bytes) -> tuple[bytes, ...]:
    """The patch of each file, in order; a file whose type changed has two."""
    starts = [match.start() for match in _HEADER.finditer(patch)]
    return tuple(patch[a:b] for a, b in itertools.pairwise([*starts, len(patch)]))


def parse_hunks(file_patch: bytes) -> tuple[Hunk, ...]:
    """Hunks of one file's patch. Bytes that are not UTF-8 become U+FFFD.

    The names in the patch are not used: the raw listing has them, unquoted.
    """
    start = 0 if file_patch.startswith(b"@@ ") else file_patch.find(b"\n@@ ") + 1
    if start == 0 and not file_patch.startswith(b"@@ "):
        return ()
    lines = file_patch[start:].decode("utf-8", "replace").removesuffix("\n").split("\n")
    parsed = PatchSet(_with_header(lines))
    return tuple(
        Hunk(
            base_start=hunk.source_start,
            head_start=hunk.target_start,
            removed=tuple((line.source_line_no, _content(line.value)) for line in hunk if line.is_removed),
            added=tuple((line.target_line_no, _content(line.value)) for line in hunk if line.is_added),
        )
        for hunk in parsed[0]
    )


def _with_header(lines: list[str]) -> Iterator[str]:
    yield "--- a/file\n"
    yield "+++ b/file\n"
    for line in lines:
        yield line + "\n"


def _content(value: str) -> str:
    return value.removesuffix("\n")
