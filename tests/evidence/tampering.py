"""Ways in which a bundle goes wrong, for tests."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from harness.domain.bundle import FileEntry, Manifest, SamplesHeader, Verification
from harness.domain.check import Outcome
from harness.domain.record import canonical_bytes
from harness.evidence.names import ATTESTATION, MANIFEST, OUTCOMES, SAMPLES_HEADER
from harness.evidence.strict_json import parse_record

__all__ = ["edit_outcomes", "rebind_samples", "rehash", "said"]


def rehash(folder: Path) -> None:
    """Make the manifest fit the files again, as a forger would."""
    manifest = parse_record((folder / MANIFEST).read_bytes(), Manifest)
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in (MANIFEST, ATTESTATION):
            content = path.read_bytes()
            files.append(FileEntry(path=name, sha256=hashlib.sha256(content).hexdigest(), size=len(content)))
    files.sort(key=lambda f: f.path)
    forged = manifest.model_copy(update={"files": tuple(files)})
    (folder / MANIFEST).write_bytes(forged.canonical())


def rebind_samples(folder: Path, plan: str | None) -> None:
    """Make every samples' header name this plan (None: no plan), and the manifest fit."""
    for path in folder.rglob(SAMPLES_HEADER):
        header = parse_record(path.read_bytes(), SamplesHeader)
        raw = header.model_copy(update={"plan": plan}).model_dump(mode="json")
        if plan is None:
            del raw["plan"]
        path.write_bytes(canonical_bytes(raw))
    rehash(folder)


def edit_outcomes(folder: Path, edit: Callable[[Outcome], Outcome | None]) -> None:
    """Rewrite outcomes (None leaves one out) and make the manifest fit."""
    lines = (folder / OUTCOMES).read_bytes().splitlines()
    edited = [edit(parse_record(line, Outcome)) for line in lines]
    (folder / OUTCOMES).write_bytes(b"".join(o.canonical() + b"\n" for o in edited if o is not None))
    rehash(folder)


def said(verification: Verification) -> str:
    """All problems as one text."""
    return "\n".join(f"{p.path}: {p.message}" for p in verification.problems)
