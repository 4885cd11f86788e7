"""A journal on disk: one canonical JSON line an entry, appended and never rewritten, chained by digests.

Reading verifies the chain and raises at the first line that does not fit. Who holds the whole file can write
another one; what binds it is the digest of its last entry in a loop's result, or in a signed bundle.
"""

import fcntl
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.domain.errors import EvidenceError
from harness.domain.journal import FIRST, JournalEntry
from harness.evidence.strict_json import parse_record

__all__ = ["JOURNAL", "append_entry", "load_journal", "put_journal", "render_journal"]

JOURNAL = "journal.jsonl"
"""Name among a bundle's logs."""
MAX_BYTES = 64 * 2**20
MAX_LINE = 4 * 2**20


def append_entry(path: Path, **given: Any) -> JournalEntry:
    """Put one entry behind the last one; raises `EvidenceError` where what is there is no journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        entries = load_journal(path) if path.stat().st_size else ()
        entry = JournalEntry(
            number=len(entries), previous=entries[-1].digest() if entries else FIRST,
            at=datetime.now(UTC).replace(microsecond=0), **given,
        )  # fmt: skip
        file.write(entry.canonical() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return entry


def load_journal(path: Path) -> tuple[JournalEntry, ...]:
    """Every entry; raises `EvidenceError` at the first line that is torn, or does not follow from the one
    before.
    """
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise EvidenceError(
            f"{path} is no journal: missing, or above {MAX_BYTES} bytes; name the loop's own file"
        )
    entries: list[JournalEntry] = []
    previous = FIRST
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            entry = parse_record(line, JournalEntry)
        except EvidenceError as error:
            raise EvidenceError(f"{path}:{number}: this entry {error}") from error
        if entry.number != number - 1 or entry.previous != previous:
            raise EvidenceError(
                f"{path}:{number}: this entry does not follow from the one before it; the journal was "
                "changed after it was written, so it shows nothing"
            )
        previous = entry.digest()
        entries.append(entry)
    if not path.read_bytes().endswith(b"\n"):
        raise EvidenceError(f"{path}: its last line is torn; it counts up to entry {len(entries) - 1}")
    return tuple(entries)


def put_journal(logs: Path, journal: Path) -> None:
    """A verified copy among the logs that travel in a bundle."""
    load_journal(journal)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / JOURNAL).write_bytes(journal.read_bytes())


def render_journal(entries: Sequence[JournalEntry]) -> str:
    """The journal as Markdown, for people."""
    attempts = [e for e in entries if e.kind == "attempt"]
    accepted = [e for e in attempts if e.result is not None and e.result.accepted]
    lines = [f"# Attempts at {entries[0].op if entries else 'nothing'}", ""]
    lines += [f"{len(attempts)} attempts, {len(accepted)} accepted.", ""]
    for entry in entries:
        result = entry.result
        if result is None:
            lines += [f"- {entry.at.isoformat()} {entry.kind}: {entry.words}", ""]
            continue
        ended = "accepted" if result.accepted else f"rejected at {result.stage}"
        lines += [
            f"## Attempt {result.attempt}: {ended}",
            "",
            f"- question: {_line(entry.question)}",
            f"- predicted: {_line(entry.predicted)}",
            f"- change: `{(entry.change or '')[:12]}`",
            f"- result: {_line(result.words)}",
            f"- next: {_line(entry.next or result.next_step)}",
            "",
        ]
    return "\n".join(lines)


def _line(text: str) -> str:
    """One line without markup of its own."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")[:600] or "not said"
