"""Which bundles and fault scores lie under a folder, without opening any.

A bundle is a folder with a manifest or a file `*.tar.zst`; a fault score, as `fasttrack faults run --out`
writes it, is a file `*faults.json`. No link is followed, no folder of a bundle or of an unfinished run is
entered, and the walk is bounded.
"""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from harness.domain.errors import InputError
from harness.evidence.names import MANIFEST, PLAN

__all__ = ["SCORE", "Source", "find_bundles"]

MAX_ENTRIES = 5_000_000
MAX_DEPTH = 12
ARCHIVE = ".tar.zst"
SCORE = "faults.json"


class Source(NamedTuple):
    """One place that holds a bundle or a fault score."""

    path: str
    """Relative to the folder, with forward slashes."""
    signature: str
    """Changes whenever the bundle does: time and size of its manifest or archive."""


def find_bundles(folder: Path) -> tuple[Source, ...]:
    """Every bundle and fault score under `folder`, sorted by path; raises `InputError`."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name one that holds bundles")
    found: list[Source] = []
    seen = 0
    todo = [("", 0)]
    while todo:
        prefix, depth = todo.pop()
        entries = _entries(folder / prefix)
        seen += len(entries)
        if seen > MAX_ENTRIES:
            raise InputError(f"{folder} holds over {MAX_ENTRIES} files and folders; name a smaller one")
        names = {entry.name for entry in entries}
        if MANIFEST in names or PLAN in names:
            found += _source(folder, f"{prefix}/{MANIFEST}" if prefix else MANIFEST, prefix or ".")
            continue
        for entry in entries:
            path = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.name.endswith((ARCHIVE, SCORE)):
                found += _source(folder, path, path)
            elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
                todo.append((path, depth + 1))
    return tuple(sorted(found))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if not e.is_symlink()]
    except PermissionError:
        return []


def _source(folder: Path, file: str, path: str) -> list[Source]:
    """The source whose `file` says whether it changed; none where that is no regular file."""
    try:
        status = os.lstat(folder / file)
    except FileNotFoundError:
        return []  # an unfinished run
    if not stat.S_ISREG(status.st_mode):
        return []
    return [Source(path, f"{status.st_mtime_ns}.{status.st_size}.{status.st_ino}")]
