"""Where each thing of a bundle lies, and which paths a bundle may hold at all.

Invariant: every path that `check_path` accepts is relative, printable ASCII, has no `.` or `..`, fits a USTAR
header, and means the same on file systems that fold case or normalise Unicode.
"""

import re
from collections.abc import Iterable

from harness.domain.record import sha256_hex

__all__ = [
    "ATTESTATION", "ENVIRONMENT", "LEDGER", "LOGS", "MANIFEST", "OUTCOMES", "PLAN", "SAMPLES",
    "SAMPLES_HEADER", "SCRATCH", "check_path", "colliding_paths", "samples_folder", "table_file",
]  # fmt: skip

MANIFEST = "manifest.json"
PLAN = "plan.json"
OUTCOMES = "outcomes.jsonl"
ENVIRONMENT = "environment.json"
ATTESTATION = "attestation.json"
SAMPLES = "samples"
LEDGER = "ledger"
LOGS = "logs"
SCRATCH = ".scratch"
"""Only while a run goes; never in a bundle."""
SAMPLES_HEADER = "samples.json"

MAX_SLUG = 120
MAX_DEPTH = 6
MAX_PATH = 240
_SEGMENT = re.compile(r"[A-Za-z0-9_.=~+@-]{1,98}")
_FOLDER = re.compile(r"[A-Za-z0-9_.=~+@-]{1,140}")
_WINDOWS_DEVICE = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def samples_folder(check: str) -> str:
    """Folder of a check's samples. Injective: `/` and `:` become characters that ids cannot hold, and an id
    that is long or has capitals (which some file systems fold) also gets its digest.
    """
    slug = check.replace("/", "~").replace(":", "=")
    if len(slug) > MAX_SLUG or slug != slug.lower():
        slug = f"{slug[: MAX_SLUG - 17]}~{sha256_hex(check.encode())[:16]}"
    return f"{SAMPLES}/{slug}"


def table_file(check: str, table: str) -> str:
    """Parquet file of one table of a check's samples."""
    return f"{samples_folder(check)}/{table}.parquet"


def check_path(path: str) -> str | None:
    """Why a bundle may not hold this path, or None for one that it may."""
    segments = path.split("/")
    if path.startswith("/") or (len(path) > 1 and path[1] == ":"):
        return "is absolute"
    if ".." in segments or "." in segments or "" in segments:
        return "leaves or repeats a folder (`..`, `.` or an empty part)"
    if not all(_FOLDER.fullmatch(s) for s in segments[:-1]) or not _SEGMENT.fullmatch(segments[-1]):
        return "has a character or a length that bundle paths do not allow"
    if any(s.endswith(".") or _WINDOWS_DEVICE.fullmatch(s) for s in segments):
        return "is a name that some file systems change or reserve"
    if len(segments) > MAX_DEPTH or len(path) > MAX_PATH:
        return f"is deeper than {MAX_DEPTH} folders or longer than {MAX_PATH} characters"
    return None


def colliding_paths(paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of paths that are one file where case is folded, or a file where the other has a folder."""
    seen: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    names = sorted(set(paths))
    for path in names:
        key = path.casefold()
        if key in seen:
            pairs.append((seen[key], path))
        seen.setdefault(key, path)
    for path in names:
        parts = path.casefold().split("/")
        for depth in range(1, len(parts)):
            file = seen.get("/".join(parts[:depth]))
            if file is not None:
                pairs.append((file, path))
    return tuple(pairs)
