"""What a changed path is, rather than what is written in it."""

import posixpath
import re
from collections.abc import Iterator
from typing import Final

from harness.domain.change import FileKind
from harness.domain.policy import Rule
from harness.stages.isolation.evidence_files import is_plain_data, why_no_evidence
from harness.stages.isolation.source import CODE_SUFFIXES, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = [
    "find_file_kind", "find_giant_file", "find_judge_and_judged", "find_licence_removed",
    "find_opaque_evidence",
]  # fmt: skip

LICENCE: Final = re.compile(
    r"SPDX-License-Identifier|Licensed under|Copyright \(|\bCopyright [\d©]|All rights reserved"
)


def find_file_kind(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Files at head of a kind that the rule's patterns name, such as `symlink_out` or `binary_code`."""
    for kind, note in _kinds(source):
        if kind in rule.patterns:
            yield Match(None, source.path, note)


def find_opaque_evidence(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Files that are no text, and neither a bundle that verifies nor plain tensors."""
    opaque = (FileKind.BINARY, FileKind.NOT_UTF8, FileKind.LFS_POINTER)
    if source.file.status != "deleted" and source.file.kind in opaque:
        problem = why_no_evidence(source.path, source.content)
        if problem is not None:
            yield Match(None, source.path, problem)


def find_giant_file(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Files at head over the limit that the policy sets."""
    if source.file.status == "deleted" or source.file.kind in (FileKind.SUBMODULE, FileKind.SYMLINK):
        return
    if source.content is None or len(source.content) > around.max_file_bytes:
        size = "more bytes than can be read" if source.content is None else f"{len(source.content)} bytes"
        yield Match(None, source.path, f"{size}, over {around.max_file_bytes}")


def find_licence_removed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Files that name a licence or owner at base and none at head."""
    if source.before is None or source.after is None:
        return
    if LICENCE.search(source.before[:4000]) and not LICENCE.search(source.after[:4000]):
        removed = (line for hunk in source.file.hunks for _, line in hunk.removed)
        yield Match(None, next((line.strip() for line in removed if LICENCE.search(line)), source.path))


def find_judge_and_judged(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Files of the rule's zones that were changed together with model code."""
    is_addition = source.file.status == "added"
    if "model_code" in around.changed_zones and not (is_addition and "changed_only" in rule.patterns):
        yield Match(None, source.path, "changed together with model code")


def _kinds(source: Source) -> Iterator[tuple[str, str]]:
    file = source.file
    if file.status == "deleted":
        return
    is_code = source.path.lower().endswith(CODE_SUFFIXES)
    if file.kind is FileKind.SYMLINK:
        target = (source.content or b"").decode("utf-8", "replace")
        is_out = target.startswith("/") or posixpath.normpath(
            posixpath.join(posixpath.dirname(source.path), target)
        ).startswith("..")
        yield ("symlink_out" if is_out else "symlink"), f"a link to {target[:200]}"
    elif file.kind is FileKind.SUBMODULE:
        yield "submodule", "another repository at a commit that is not in this diff"
    elif file.kind is FileKind.LFS_POINTER:
        yield "lfs_pointer", "the content is elsewhere"
    elif file.kind is FileKind.BINARY:
        is_data = not is_code and is_plain_data(source.path, source.content)
        kind, note = ("data", "numbers only") if is_data else ("binary", "no text that could be read")
        yield ("binary_code" if is_code else kind), note
    elif file.kind is FileKind.NOT_UTF8:
        yield ("not_utf8_code" if is_code else "not_utf8"), "text that is not UTF-8 cannot be judged"
    if file.new_mode == "100755" and file.old_mode != "100755":
        yield "executable", "became executable"
    if file.status == "type_changed":
        yield "type_changed", f"mode {file.old_mode} became {file.new_mode}"
