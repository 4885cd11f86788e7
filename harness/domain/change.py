"""The pull request as git sees it."""

from enum import StrEnum
from typing import Annotated, Literal, Protocol

from pydantic import Field

from harness.domain.record import Record, Whole

__all__ = ["Change", "ChangedFile", "FileKind", "Hunk", "Sha", "SourceTree"]

Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Git's id of the empty tree: the base of a repository's root commit."""


class FileKind(StrEnum):
    """What a changed path is at head (at base for a deletion)."""

    TEXT = "text"
    BINARY = "binary"
    SYMLINK = "symlink"
    SUBMODULE = "submodule"
    LFS_POINTER = "lfs_pointer"
    NOT_UTF8 = "not_utf8"


class Hunk(Record):
    """Lines of one hunk, numbered from 1; text without the final newline."""

    base_start: Whole
    head_start: Whole
    removed: tuple[tuple[Whole, str], ...]
    """(line at base, text)."""
    added: tuple[tuple[Whole, str], ...]
    """(line at head, text)."""


class ChangedFile(Record):
    """One path that differs between base and head."""

    path: str
    """Path at head; at base for a deletion. May hold any character that git allows."""
    old_path: str | None = None
    """Path at base where it was renamed or copied."""
    status: Literal["added", "modified", "deleted", "renamed", "copied", "type_changed"]
    kind: FileKind
    old_mode: str | None = None
    new_mode: str | None = None
    added_lines: Whole = 0
    removed_lines: Whole = 0
    hunks: tuple[Hunk, ...] = ()
    """Empty for anything but text."""


class Change(Record):
    """The range that is judged."""

    repository: str
    """Remote URL without credentials, or the folder's name where there is no remote."""
    pr: Whole | None = None
    base: Sha
    head: Sha
    is_dirty: bool = False
    """Whether the working tree differed from head when read: evidence is then not bound to a SHA."""
    files: tuple[ChangedFile, ...] = ()

    def without_hunks(self) -> "Change":
        """The same change without its text: what plans and bundles carry."""
        return self.model_copy(
            update={"files": tuple(f.model_copy(update={"hunks": ()}) for f in self.files)}
        )

    @property
    def added_lines(self) -> int:
        """Added lines over all files."""
        return sum(f.added_lines for f in self.files)


class SourceTree(Protocol):
    """Read access to the files of one repository at base and head. Never the working tree."""

    def read(self, side: Literal["base", "head"], path: str) -> bytes | None:
        """Content of `path`, or None where it does not exist; raises `InputError` for one over the
        size limit.
        """

    def paths(self, side: Literal["base", "head"]) -> tuple[str, ...]:
        """Every path of the tree, sorted."""
