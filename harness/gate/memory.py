"""Submissions that were verified here before: what verifying a bundle gave, kept by what it was found from.

A verification is a pure function of the bundle's bytes, of the code that plans and judges, of the libraries
it computes with, and of the day (waivers end). So an entry's name is the digest of all of these, and a bundle
is taken from memory only when its bytes have been hashed just now: every file of a folder against its
manifest, or the whole of an archive. Nothing in a bundle leads here.

Invariant: whoever can write into the folder decides what gates say, so it must belong to the user who asks,
and nobody else may write there; it is made so, and refused otherwise. It is used only where somebody names
it, and must not lie where a candidate's code runs as the same user.
"""

import os
import platform
import stat
from collections.abc import Iterable
from datetime import UTC, date, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from harness.domain.bundle import Verification
from harness.domain.check import Check, Outcome
from harness.domain.claim import Claim
from harness.domain.errors import EvidenceError, InputError
from harness.domain.plan import Plan
from harness.domain.record import Digest, Record, canonical_bytes, sha256_hex
from harness.domain.resources import data_folder
from harness.engines.packs import harness_digest, installed_packs, load_pack, pack_digest, source_digest
from harness.evidence.bundle import digest_file
from harness.evidence.run_folder import write_atomically
from harness.evidence.strict_json import read_bounded
from harness.evidence.verify import content_digest
from harness.gate.submission import Submission

__all__ = ["Memory", "open_memory", "recall", "remember"]

LIBRARIES = (
    "numpy", "scipy", "pyarrow", "pydantic", "pydantic-core", "rfc8785", "cryptography", "pyyaml",
    "pathspec", "torch", "nvidia-cutlass-dsl", "sigstore",
)  # fmt: skip
"""What planning and judging compute with, or ask whether it is there."""
MAX_ENTRY_BYTES = 512 * 2**20
MAX_ENTRIES = 2000
"""Kept; the oldest go first."""


class Remembered(Record):
    """A submission as it was judged, without the name that it was handed in under."""

    key: Digest
    """Of bundle, code, libraries and day; again inside, so that a renamed file is no other's entry."""
    verification: Verification
    plan: Plan
    outcomes: tuple[Outcome, ...]
    asks_planned: bool
    """Whether `asked` is the plan's own checks, which most are."""
    asked: tuple[Check, ...] | None
    claim: Claim | None
    has_other_pack: bool


class Memory:
    """An open folder of entries. Made by `open_memory`."""

    def __init__(self, folder: Path, code: Digest) -> None:
        self.folder = folder
        self.code = code

    def key(self, bundle: Path) -> Digest | None:
        """Name of the entry for a folder or archive, read now; None for a bundle that does not hold together,
        or a run that goes.
        """
        content = digest_file(bundle)[0] if bundle.is_file() else content_digest(bundle)
        return None if content is None else sha256_hex(f"{self.code}:{content}".encode())


def open_memory(folder: Path, trusted_root: Path | None = None) -> Memory:
    """The memory in a folder, made where it is not there, of what was found with that root of trust. Raises
    `InputError` where others could write.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise InputError(f"{folder}: no memory can be kept here ({error.strerror})") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise InputError(
            f"{folder}: others can write here, and could put any verdict there; name a folder of your own "
            "with mode 0700"
        )
    code = _code_digest(datetime.now(UTC).date(), date.today())
    root = "" if trusted_root is None else digest_file(trusted_root)[0]
    return Memory(folder, sha256_hex(f"{code}:{root}".encode()))


def recall(memory: Memory, key: Digest, name: str) -> Submission | None:
    """What was found before, under the name that the bundle has now; None where nothing was."""
    path = memory.folder / f"{key}.json"
    if not path.exists():
        return None
    try:
        found = Remembered.model_validate_json(read_bounded(path, MAX_ENTRY_BYTES))
    except (EvidenceError, ValidationError):
        return None  # of a writer that was killed, or of another form: verified again, and written anew
    if found.key != key:
        return None
    return Submission(
        name,
        found.verification,
        found.plan,
        found.outcomes,
        asked=found.plan.checks if found.asks_planned else found.asked,
        claim=found.claim,
        has_other_pack=found.has_other_pack,
    )


def remember(memory: Memory, key: Digest, submission: Submission) -> None:
    """Keep what was found; nothing for a bundle without a plan."""
    plan = submission.plan
    if plan is None:
        return
    is_same = submission.asked == plan.checks
    entry = Remembered(
        key=key,
        verification=submission.verification,
        plan=plan,
        outcomes=submission.outcomes,
        asks_planned=is_same,
        asked=None if is_same else submission.asked,
        claim=submission.claim,
        has_other_pack=submission.has_other_pack,
    )
    write_atomically(memory.folder / f"{key}.json", entry.model_dump_json().encode())
    _forget_oldest(memory.folder.glob("*.json"))


def _forget_oldest(entries: Iterable[Path]) -> None:
    by_age = sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[MAX_ENTRIES:]:
        path.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _code_digest(*days: date) -> Digest:
    """Digest of all that decides besides the bundle."""
    return sha256_hex(
        canonical_bytes(
            {
                "harness": harness_digest(),
                "packs": {name: _pack_words(name) for name in installed_packs()},
                "data": [source_digest(data_folder(kind)) for kind in ("evals", "sweeps", "policies")],
                "python": platform.python_version() + platform.machine(),
                "libraries": {name: _version(name) for name in LIBRARIES},
                "days": [day.isoformat() for day in days],
            }
        )
    )


def _pack_words(name: str) -> str:
    try:
        return pack_digest(load_pack(name))
    except InputError as error:
        return str(error)  # nothing is planned with it, for this reason


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
