"""From a run to a bundle: everything redacted and digested, the manifest last."""

import hashlib
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness.domain.bundle import Environment, FileEntry, Manifest
from harness.domain.errors import EvidenceError
from harness.domain.machine import Machine
from harness.evidence.environment import read_environment
from harness.evidence.names import ENVIRONMENT, MANIFEST, OUTCOMES, check_path
from harness.evidence.run_folder import RunFolder, write_atomically
from harness.evidence.strict_json import open_regular

__all__ = ["digest_file", "write_bundle"]

CHUNK = 2**20
MAX_LOG_BYTES = 2**20
"""Of one log: whoever prints more than this says nothing that anybody reads."""


def write_bundle(
    run: RunFolder,
    environment: Environment | None = None,
    machine: Machine | None = None,
    created: datetime | None = None,
) -> Path:
    """Finish a run in place and give its folder, now a bundle.

    A plan with checks that have no outcome gives a bundle too; it verifies as incomplete. `environment` is
    this process's where it is None, `machine` (on which the samples were made) the plan's, `created` now.
    """
    shutil.rmtree(run.scratch, ignore_errors=True)
    environment = environment or read_environment(sys.argv)
    for folder in (run.logs, run.ledger):
        _bound_logs(folder)
        for path in sorted(p for p in folder.rglob("*") if not p.is_dir()):
            _redact_file(run, path)
    write_atomically(run.folder / OUTCOMES, b"".join(o.canonical() + b"\n" for o in run.outcomes()))
    write_atomically(run.folder / ENVIRONMENT, run.redactor.environment(environment).canonical())
    files = tuple(sorted(_entries(run.folder), key=lambda f: f.path))
    os.sync()  # everything that the manifest will bind, before the manifest
    manifest = Manifest.of(run.plan, machine or run.plan.machine, files, created or datetime.now(UTC))
    write_atomically(run.folder / MANIFEST, manifest.canonical())
    return run.folder


def digest_file(path: Path) -> tuple[str, int]:
    """sha256 (hex) and size of a regular file, read in pieces; raises `EvidenceError` for any other."""
    digest = hashlib.sha256()
    size = 0
    with os.fdopen(open_regular(path), "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _entries(folder: Path) -> list[FileEntry]:
    """Every regular file of the run; folders named in `names` hold nothing else."""
    entries = []
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        reason = "is no regular file" if path.is_symlink() or not path.is_file() else check_path(name)
        if reason is not None:
            raise EvidenceError(
                f"{folder}: {name!r} {reason}; remove or rename it, then finish the run with --resume"
            )
        sha256, size = digest_file(path)
        entries.append(FileEntry(path=name, sha256=sha256, size=size))
    return entries


def _bound_logs(folder: Path) -> None:
    """Leave the end of a log that is very long, and no log that is empty."""
    for path in folder.rglob("*.log"):
        if path.is_symlink() or not path.is_file():
            continue
        size = path.stat().st_size
        if size == 0:
            path.unlink()
        elif size > MAX_LOG_BYTES:
            with path.open("rb") as file:
                file.seek(size - MAX_LOG_BYTES)
                kept = file.read()
            write_atomically(
                path, f"({size - MAX_LOG_BYTES} bytes before this were left out)\n".encode() + kept
            )


def _redact_file(run: RunFolder, path: Path) -> None:
    """Redact one log in place, and give it a name that a bundle may hold."""
    if path.is_symlink() or not path.is_file():
        os.unlink(path)  # a link or a socket is no log
        return
    root = run.logs if path.is_relative_to(run.logs) else run.ledger
    name = path.relative_to(root).as_posix()
    kept = check_path(f"{root.name}/{name}") is None
    place = path if kept else root / run.redactor.file_name(name)
    content = path.read_bytes()
    redacted = run.redactor.content(content)
    if redacted != content or place != path:
        write_atomically(place, redacted)
        if place != path:
            path.unlink()
