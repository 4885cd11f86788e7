"""Steps 1 to 4 of verifying: the files of a bundle are the ones that its manifest lists, and safe to read."""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.domain.bundle import BUNDLE_SCHEMA, Manifest, Problem
from harness.domain.check import Check, Outcome, Samples
from harness.domain.claim import Claim
from harness.domain.errors import EvidenceError
from harness.domain.plan import Plan
from harness.domain.record import sha256_hex
from harness.evidence.bundle import digest_file
from harness.evidence.names import (
    ATTESTATION,
    ENVIRONMENT,
    LEDGER,
    LOGS,
    MANIFEST,
    OUTCOMES,
    PLAN,
    SAMPLES,
    SAMPLES_HEADER,
    SCRATCH,
    check_path,
    colliding_paths,
)  # fmt: skip
from harness.evidence.reader import MAX_MANIFEST_BYTES
from harness.evidence.run_folder import TEMPORARY
from harness.evidence.strict_json import parse_json, parse_record, read_bounded

__all__ = [
    "Notes",
    "Rejudge",
    "Replan",
    "Replanned",
    "Work",
    "check_digests",
    "check_listing",
    "check_manifest",
    "check_tree",
]

Rejudge = Callable[[Check, Samples], Outcome | None]
"""Judges a check's samples again; None for a check that has no judge."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """What the planner here makes of a plan's claim, policy, change, machine and nonce."""

    harness: str
    """Digest of the harness that plans here."""
    pack: str | None
    """Digest of the pack installed here; None where none is."""
    checks: tuple[Check, ...] | None
    """None where nothing could be planned."""
    why: str = ""
    """Why there are no checks."""
    claim: Claim | None = None
    """The claim in force in the pack installed here; None where it could not be read."""

    def is_code_of(self, plan: Plan) -> bool:
        """Whether harness and pack here are those that made the plan."""
        return (self.harness, self.pack) == (plan.harness_digest, plan.pack_digest)


Replan = Callable[[Plan], Replanned]
MAX_FILES = 100_000
MAX_BUNDLE_BYTES = 64 * 2**30
_TOP_FILES = frozenset({MANIFEST, ATTESTATION, PLAN, OUTCOMES, ENVIRONMENT})


@dataclass(slots=True)
class Work:
    """What the steps found so far."""

    folder: Path
    rejudge: Rejudge | None
    replan: Replan | None
    trusted_root: Path | None = None
    """Which authority may bind identities to signatures; None: none."""
    sizes: dict[str, int] = field(default_factory=dict)
    manifest: Manifest | None = None
    digest: str | None = None
    signer: str | None = None
    plan: Plan | None = None
    parts: dict[str, str] = field(default_factory=dict)
    """Digests of the plan and of its parts, as they lie in the file."""
    replanned: Replanned | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    unbound: set[str] = field(default_factory=set)
    """Checks whose samples name no plan."""
    judged: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes as they were judged again, by check."""


@dataclass(slots=True)
class Notes:
    """What one step finds."""

    looked_at: int = 0
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    differing: list[Problem] = field(default_factory=list)
    skipped: str = ""
    note: str = ""

    def wrong(self, path: str, message: str) -> None:
        self.problems.append(Problem(path=_printable(path), message=_printable(message)))

    def differs(self, path: str, message: str) -> None:
        self.differing.append(Problem(path=_printable(path), message=_printable(message)))

    def lacks(self, path: str, message: str) -> None:
        self.missing.append(Problem(path=_printable(path), message=_printable(message)))


def check_tree(work: Work, notes: Notes) -> None:
    """Step 1."""
    if not work.folder.is_dir() or work.folder.is_symlink():
        notes.wrong("", "is no folder")
        return
    total = 0
    is_finished = (work.folder / MANIFEST).exists()
    for name, status in _walk(work.folder, is_finished):
        notes.looked_at += 1
        if notes.looked_at > MAX_FILES:
            notes.wrong("", f"holds over {MAX_FILES} files")
            return
        reason = check_path(name)
        if reason is None and stat.S_ISDIR(status.st_mode):
            continue
        if reason is None and not stat.S_ISREG(status.st_mode):
            reason = "is a link, a device, a pipe or a socket"
        if reason is None and status.st_nlink != 1:
            reason = "is a hard link: something else could change it"
        if reason is not None:
            notes.wrong(name, reason)
            continue
        work.sizes[name] = status.st_size
        total += status.st_size
    if total > MAX_BUNDLE_BYTES:
        notes.wrong("", f"takes {total} bytes; the limit is {MAX_BUNDLE_BYTES}")
    for one, two in colliding_paths(work.sizes):
        notes.wrong(two, f"is the same file as {one!r} where case is folded")


def check_manifest(work: Work, notes: Notes) -> None:
    """Step 2."""
    if MANIFEST not in work.sizes:
        notes.lacks(MANIFEST, "is not there: the run has not finished; go on with --resume")
        return
    notes.looked_at = 1
    try:
        raw = read_bounded(work.folder / MANIFEST, MAX_MANIFEST_BYTES)
        version = parse_json(raw).get("schema_version") if raw.startswith(b"{") else None
        if version != BUNDLE_SCHEMA:
            notes.wrong(
                MANIFEST, f"has schema version {version!r}; this fasttrack reads {BUNDLE_SCHEMA}, upgrade it"
            )
            return
        work.manifest = parse_record(raw, Manifest)
    except EvidenceError as error:
        notes.wrong(MANIFEST, str(error))
        return
    work.digest = sha256_hex(raw)
    for entry in work.manifest.files:
        reason = check_path(entry.path)
        if reason is not None or entry.path in (MANIFEST, ATTESTATION):
            notes.wrong(entry.path, f"is listed but {reason or 'must not be'}")


def check_listing(work: Work, notes: Notes) -> None:
    """Step 3."""
    for name in work.sizes:
        notes.looked_at += 1
        if not _has_place(name):
            notes.wrong(name, "lies where bundles hold nothing")
    if work.manifest is None:
        return
    listed = {f.path for f in work.manifest.files}
    for name in sorted(set(work.sizes) - listed - {MANIFEST, ATTESTATION}):
        notes.wrong(name, "is not listed in the manifest")
    for name in sorted(listed - set(work.sizes)):
        notes.wrong(name, "is listed in the manifest but not there")


def check_digests(work: Work, notes: Notes) -> None:
    """Step 4."""
    if work.manifest is None:
        notes.skipped = "there is no manifest yet"
        return
    for entry in work.manifest.files:
        notes.looked_at += 1
        if work.sizes[entry.path] != entry.size:
            notes.wrong(entry.path, f"has {work.sizes[entry.path]} bytes, the manifest says {entry.size}")
            continue
        try:
            sha256, _ = digest_file(work.folder / entry.path)
        except EvidenceError as error:
            notes.wrong(entry.path, str(error))
            continue
        if sha256 != entry.sha256:
            notes.wrong(entry.path, f"has digest {sha256[:16]}…, the manifest says {entry.sha256[:16]}…")


def _walk(folder: Path, is_finished: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Relative path and status of everything below, without following links."""
    pending = [""]
    while pending:
        place = pending.pop()
        with os.scandir(folder / place) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                name = f"{place}/{entry.name}" if place else entry.name
                is_leftover = entry.name == SCRATCH or entry.name.startswith(TEMPORARY)
                if is_leftover and not is_finished:
                    continue  # of a run that goes or was killed
                status = entry.stat(follow_symlinks=False)
                yield name, status
                if stat.S_ISDIR(status.st_mode) and name.count("/") < 16:
                    pending.append(name)


def _has_place(name: str) -> bool:
    top, _, rest = name.partition("/")
    if not rest:
        return top in _TOP_FILES
    if top == SAMPLES:
        _, _, file = rest.partition("/")
        return file == SAMPLES_HEADER or (file.endswith(".parquet") and "/" not in file)
    return top in (LEDGER, LOGS)


def _printable(text: str) -> str:
    """Text safe to print: control characters and lone surrogates escaped, of bounded length."""
    kept = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)[:600]
