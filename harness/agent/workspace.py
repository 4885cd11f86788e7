"""What an agent may edit, and the trees in which its edits are judged.

The workspace holds a copy of the op's own implementation files and nothing else of the pack. An attempt takes
those files, by name, into a fresh copy of the pack: whatever else the agent wrote or changed is not looked
at, so neither oracle nor harness can come from it.
"""

import difflib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from harness.domain.errors import InputError
from harness.domain.pack import OpContract, Pack
from harness.domain.record import sha256_hex

__all__ = ["Change", "editable_files", "lay_out", "read_change", "tree_with"]

MAX_FILE_BYTES = 200_000
UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc")


class Change(NamedTuple):
    """What differs from the beginning."""

    files: Mapping[str, str]
    """Text of every editable file by its repository path."""
    patch: str
    digest: str
    """sha256 of the patch."""


def editable_files(contract: OpContract, implementation: str) -> tuple[str, ...]:
    """Repository paths of one implementation of an op: those of its files in a folder of that name."""
    return tuple(f for f in contract.files if implementation in PurePosixPath(f).parts[:-1])


def lay_out(workspace: Path, source: Path, files: tuple[str, ...]) -> None:
    """Editable files as they are in the repository `source`, and a note on what they are."""
    for name in files:
        target = workspace / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (source / name).is_file():
            raise InputError(f"{source / name} is missing; an agent needs a file to begin with")
        shutil.copyfile(source / name, target)


def _read_plain(place: Path) -> bytes:
    """A file's bytes, of what was opened: a link or a pipe put there since it was looked at is refused."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no plain file")
        return file.read(MAX_FILE_BYTES + 1)


def read_change(workspace: Path, start: Mapping[str, str]) -> Change:
    """The files as the agent left them; raises `InputError`, for the agent to read, where one is no plain
    text of sensible size.
    """
    files = {}
    for name in start:
        place = workspace / name
        try:
            info = place.lstat()
        except OSError as error:
            raise InputError(f"{name} is gone; put it back") from error
        is_inside = place.parent.resolve().is_relative_to(workspace.resolve())
        if not stat.S_ISREG(info.st_mode) or not is_inside:
            raise InputError(f"{name} is no plain file of the workspace; links are not followed")
        if info.st_size > MAX_FILE_BYTES:
            raise InputError(f"{name} has {info.st_size} bytes; {MAX_FILE_BYTES} at most")
        try:
            files[name] = _read_plain(place).decode("utf-8")
        except OSError as error:
            raise InputError(f"{name} cannot be read as a plain file of the workspace: {error}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is no UTF-8 text: {error}") from error
    patch = "".join(
        line
        for name, before in start.items()
        for line in difflib.unified_diff(
            before.splitlines(keepends=True), files[name].splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    )
    return Change(files, patch, sha256_hex(patch.encode()))


def tree_with(pack: Pack, source: Path, files: Mapping[str, str], folder: Path) -> Path:
    """A source root with the pack of the repository `source` and these files in it; `folder` is emptied."""
    prefix = pack.repository_prefix.rstrip("/")
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(source / prefix, folder / PurePosixPath(prefix).name, ignore=UNWANTED)
    for name, text in files.items():
        inside = PurePosixPath(name).relative_to(prefix)
        target = folder / PurePosixPath(prefix).name / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder
