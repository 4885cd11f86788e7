"""A range of a repository as a `Change`.

Invariant: every path that differs between the two trees is in the change exactly once, whatever its name,
kind or attributes; nothing that the repository contains can hide one. What a path means is the isolation
stage's business.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from harness.domain.change import Change, ChangedFile, FileKind, Hunk
from harness.domain.errors import InputError
from harness.repository.git import GitFailed, OutputTooLarge, run_git
from harness.repository.limits import Limits
from harness.repository.patch import parse_hunks, split_patch
from harness.repository.revisions import object_folder, repository_name, resolve_range
from harness.repository.scratch import ScratchGit
from harness.repository.tree import GitTree, Side, shown_path
from harness.repository.worktree import describe_dirt

__all__ = ["load_change"]

Status = Literal["added", "modified", "deleted", "renamed", "copied", "type_changed"]
STATUSES: Final[dict[str, Status]] = {
    "A": "added", "M": "modified", "D": "deleted", "R": "renamed", "C": "copied", "T": "type_changed",
}  # fmt: skip
LFS_HEADER: Final = b"version https://git-lfs.github.com/spec/v1\n"
LFS_MAX_BYTES: Final = 1024  # the pointer specification's own limit
# Fixed, so that no configuration decides what a diff is; renames over the limit are deletion and addition.
DIFF: Final = (
    "diff-tree", "-r", "-M", "-C", "-l1000", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index",
    "--ignore-submodules=none", "--inter-hunk-context=0", "--diff-algorithm=myers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Raw:
    """One line of the raw listing."""

    old_mode: str
    new_mode: str
    status: Status
    path: str
    old_path: str | None


def load_change(
    repo: Path, base: str, head: str, limits: Limits | None = None, pr: int | None = None
) -> tuple[Change, GitTree]:
    """The change from `base` (its merge base with head) to `head`, and both of its trees; close the tree.

    Raises `InputError` for a folder that is no repository, a name that is no commit of it, histories that do
    not meet, objects that a shallow or partial clone lacks, and a change over the limits.
    """
    bounds = limits if limits is not None else Limits()
    names = resolve_range(repo, base, head)
    scratch = ScratchGit(object_folder(repo))
    tree = GitTree(scratch, names.base, names.head, bounds)
    try:
        files = _read_files(scratch, tree, names.base, names.head, bounds)
        change = Change(
            repository=repository_name(repo),
            pr=pr,
            base=names.base,
            head=names.head,
            is_dirty=describe_dirt(repo, names.head) is not None,
            files=files,
        )
    except BaseException:
        tree.close()
        raise
    return change, tree


def _read_files(
    scratch: ScratchGit, tree: GitTree, base: str, head: str, limits: Limits
) -> tuple[ChangedFile, ...]:
    raw = _parse_raw(_diff(scratch, ["--raw", "-z"], base, head, limits))
    if len(raw) > limits.max_changed_files:
        raise InputError(
            f"{len(raw)} files differ between {base[:12]} and {head[:12]}, over the limit of "
            f"{limits.max_changed_files} (max_changed_files); judge a smaller range or raise it in the policy"
        )
    patches = iter(split_patch(_diff(scratch, ["-p", "-U0"], base, head, limits)))
    files = []
    for entry in raw:
        own = [next(patches) for _ in range(2 if entry.status == "type_changed" else 1)]
        files.append(_changed_file(entry, tree, own))
    assert next(patches, None) is None, "the raw listing and the patch disagree"
    return tuple(sorted(files, key=lambda file: file.path))


def _diff(scratch: ScratchGit, form: list[str], base: str, head: str, limits: Limits) -> bytes:
    try:
        return run_git(
            [*DIFF, *form, base, head],
            folder=scratch.root,
            environment=scratch.environment,
            timeout_s=limits.timeout_s,
            max_output=limits.max_diff_bytes,
        )
    except GitFailed as error:
        raise InputError(
            f"{base[:12]}..{head[:12]} cannot be compared ({error}); this clone lacks objects, so fetch both "
            "commits whole"
        ) from error
    except OutputTooLarge as error:
        raise InputError(
            f"the diff {base[:12]}..{head[:12]} is over the limit of {limits.max_diff_bytes} bytes "
            "(max_diff_bytes); judge a smaller range or raise it in the policy"
        ) from error


def _parse_raw(listing: bytes) -> list[_Raw]:
    fields = iter(listing.split(b"\0")[:-1])
    entries = []
    for header in fields:
        old_mode, new_mode, _, _, letter = header.decode("ascii").removeprefix(":").split()
        first = shown_path(next(fields))
        has_two = letter[0] in "RC"
        path, old_path = (shown_path(next(fields)), first) if has_two else (first, None)
        entries.append(_Raw(old_mode, new_mode, STATUSES[letter[0]], path, old_path))
    return entries


def _changed_file(entry: _Raw, tree: GitTree, patches: list[bytes]) -> ChangedFile:
    side: Side = "base" if entry.status == "deleted" else "head"
    kind = _kind(tree, side, entry.path, entry.old_mode if side == "base" else entry.new_mode)
    hunks: tuple[Hunk, ...] = ()
    if kind in (FileKind.TEXT, FileKind.NOT_UTF8):
        hunks = tuple(hunk for patch in patches for hunk in parse_hunks(patch))
    return ChangedFile(
        path=entry.path,
        old_path=entry.old_path,
        status=entry.status,
        kind=kind,
        old_mode=None if entry.old_mode == "000000" else entry.old_mode,
        new_mode=None if entry.new_mode == "000000" else entry.new_mode,
        added_lines=sum(len(hunk.added) for hunk in hunks),
        removed_lines=sum(len(hunk.removed) for hunk in hunks),
        hunks=hunks if kind is FileKind.TEXT else (),
    )


def _kind(tree: GitTree, side: Side, path: str, mode: str) -> FileKind:
    """What the path is; a file too large to read counts as binary."""
    if mode == "120000":
        return FileKind.SYMLINK
    if mode == "160000":
        return FileKind.SUBMODULE
    if not tree.is_readable(side, path):
        return FileKind.BINARY
    content = tree.read(side, path) or b""
    if len(content) <= LFS_MAX_BYTES and content.startswith(LFS_HEADER):
        return FileKind.LFS_POINTER
    if b"\0" in content:
        return FileKind.BINARY
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return FileKind.NOT_UTF8
    return FileKind.TEXT
