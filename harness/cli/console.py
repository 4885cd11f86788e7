"""How the command line speaks: tables of outcomes on standard output, progress on standard error.

The JSON form of a command is the record that the bundle stores, printed once.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["STATUS_STYLES", "err", "out", "outcome_table", "print_json", "progress_bar", "shortened"]

STATUS_STYLES = {
    "PASS": "green",
    "FAIL": "bold red",
    "NO_EVIDENCE": "yellow",
    "INVALID": "magenta",
    "INCONCLUSIVE": "cyan",
    "SKIPPED": "dim",
}
PLAIN_EVERY_S = 5.0
"""Without a terminal, one progress line at most this often."""
BAR_WIDTH, BESIDE_BAR = 12, 38
"""Columns of the bar, and of counts, times and spaces beside it."""
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(record: Any) -> None:
    """One document on standard output: a record, or plain JSON data."""
    from harness.domain.record import Record, canonical_bytes

    content = record.canonical() if isinstance(record, Record) else canonical_bytes(record)
    sys.stdout.write(content.decode() + "\n")


def outcome_table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    """Rows of (status, check, summary)."""
    table = Table(title=title, title_justify="left", show_lines=False, pad_edge=False)
    table.add_column("status", no_wrap=True)
    table.add_column("check", overflow="fold")
    table.add_column("what was seen", overflow="fold")
    for status, check, summary in rows:
        style = STATUS_STYLES.get(status, "")
        table.add_row(f"[{style}]{status}[/]" if style else escape(status), escape(check), escape(summary))
    return table


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A callable (text, done, total, seconds left) that shows progress; a bar on a terminal, else sparse
    lines.
    """
    if not err.is_terminal:
        yield _plain_reporter()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(BAR_WIDTH), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    room = max(20, min(60, err.width - BAR_WIDTH - BESIDE_BAR))
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("planning", total=None, left="")

        def show(text: str, done: int, total: int, left_s: float | None) -> None:
            left = "" if left_s is None else f"about {left_s:.0f} s left"
            shown = escape(shortened(text, room).ljust(room))
            bar.update(task, description=shown, completed=done, total=total, left=left)

        yield show


def shortened(text: str, width: int) -> str:
    """Text of at most `width` characters; the middle of a longer one goes, as ids differ at both ends."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}\u2026{text[len(text) - (width - 1 - head) :]}"


def _plain_reporter() -> Any:
    last = [0.0]

    def show(text: str, done: int, total: int, left_s: float | None) -> None:
        now = time.monotonic()
        if now - last[0] >= PLAIN_EVERY_S or done == total:
            last[0] = now
            left = "" if left_s is None else f", about {left_s:.0f} s left"
            err.print(escape(f"[{done}/{total}{left}] {text}"), soft_wrap=True)

    return show
