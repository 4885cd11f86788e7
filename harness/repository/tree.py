"""Both sides of a change, file by file, out of git's objects."""

import os
import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from harness.domain.errors import InputError
from harness.repository.git import MAX_OUTPUT, GitFailed, run_git
from harness.repository.limits import Limits
from harness.repository.scratch import ScratchGit

__all__ = ["Entry", "GitTree", "Side", "shown_path"]

Side = Literal["base", "head"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a tree."""

    mode: str
    blob: str
    size: int | None
    """Bytes; None for a submodule."""


def shown_path(path: bytes) -> str:
    """A path as text; bytes that are not UTF-8 as `\\xNN`."""
    try:
        return path.decode("utf-8")
    except UnicodeDecodeError:
        return path.decode("utf-8", "backslashreplace")


class GitTree:
    """`SourceTree` over two trees. Owns a scratch git directory and one `cat-file` process until closed."""

    def __init__(self, scratch: ScratchGit, base: str, head: str, limits: Limits) -> None:
        self._scratch = scratch
        self._ids = {"base": base, "head": head}
        self._limits = limits
        self._entries: dict[str, dict[str, Entry]] = {}
        self._reader: subprocess.Popen[bytes] | None = None
        self._reader_of = 0

    def read(self, side: Side, path: str) -> bytes | None:
        """Content of `path` (a symlink's target), or None where there is no file."""
        entry = self.entry(side, path)
        if entry is None or entry.size is None:
            return None
        if entry.size > self._limits.max_blob_bytes:
            raise InputError(
                f"{path} at {side} has {entry.size} bytes, over the limit of {self._limits.max_blob_bytes} "
                "for one file; take it out of the change or raise the limit"
            )
        return self._blob(entry.blob, path)

    def entry(self, side: Side, path: str) -> Entry | None:
        """Mode, blob and size of `path`, or None where there is no file."""
        return self._side(side).get(path)

    def is_readable(self, side: Side, path: str) -> bool:
        """Whether `read` gives content: the file exists, is no submodule and is under the size limit."""
        entry = self.entry(side, path)
        return entry is not None and entry.size is not None and entry.size <= self._limits.max_blob_bytes

    def paths(self, side: Side) -> tuple[str, ...]:
        """Every path of the tree, sorted."""
        return tuple(sorted(self._side(side)))

    def close(self) -> None:
        """End the reader and delete the scratch directory."""
        if self._reader is not None:
            self._reader.kill()
            self._reader.communicate()
            self._reader = None
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _side(self, side: Side) -> dict[str, Entry]:
        if side not in self._entries:
            self._entries[side] = self._list(self._ids[side])
        return self._entries[side]

    def _list(self, tree: str) -> dict[str, Entry]:
        try:
            listing = run_git(
                ["ls-tree", "-r", "-l", "-z", "--full-tree", tree],
                folder=self._scratch.root,
                environment=self._scratch.environment,
                timeout_s=self._limits.timeout_s,
                max_output=4 * MAX_OUTPUT,
            )
        except GitFailed as error:
            raise InputError(
                f"the files of {tree[:12]} cannot be listed ({error}); fetch the whole commit"
            ) from error
        entries: dict[str, Entry] = {}
        for record in listing.split(b"\0")[:-1]:
            head, _, raw_path = record.partition(b"\t")
            mode, _, blob, size = head.decode("ascii").split()
            path = shown_path(raw_path)
            if path in entries:
                raise InputError(f"two files of {tree[:12]} are both shown as {path!r}; rename one of them")
            entries[path] = Entry(mode, blob, None if size == "-" else int(size))
        return entries

    def _blob(self, blob: str, path: str) -> bytes:
        process = self._batch()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(blob.encode("ascii") + b"\n")
        process.stdin.flush()
        header = process.stdout.readline().split()
        if len(header) != 3:
            raise InputError(
                f"{path}: its content ({blob[:12]}) is not in this clone; fetch the whole commit"
            )
        content = process.stdout.read(int(header[2]))
        process.stdout.read(1)
        return content

    def _batch(self) -> subprocess.Popen[bytes]:
        if self._reader is None or self._reader_of != os.getpid():  # a forked process has one of its own
            self._reader_of = os.getpid()
            self._reader = subprocess.Popen(
                ["git", "cat-file", "--batch"],
                cwd=self._scratch.root,
                env=self._scratch.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._reader
