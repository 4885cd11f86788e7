"""`fasttrack journal show|export`: what an agent tried."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import JsonOutput

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Show or export an agent's journal; its chain is verified first."
)
JournalFile = Annotated[
    Path, typer.Argument(metavar="JOURNAL", help="journal.jsonl, or a bundle that holds one.")
]


@app.command("show")
def show(journal: JournalFile, json: JsonOutput = False) -> None:
    """Attempts with what came of them; exit 2 where the chain is broken."""
    from harness.cli.console import out, outcome_table, print_json

    entries = _entries(journal)
    if json:
        print_json({"entries": [e.model_dump(mode="json") for e in entries]})
        return
    rows = [
        ("PASS" if e.result.accepted else "FAIL", f"{e.result.attempt} {e.result.stage}", e.result.words)
        for e in entries
        if e.result is not None
    ]
    out.print(outcome_table(f"{len(rows)} attempts at {entries[0].op if entries else 'nothing'}", rows))
    for entry in entries:
        if entry.result is None:
            out.print(f"{entry.kind}: {entry.words}", markup=False, soft_wrap=True)


@app.command("export")
def export(
    journal: JournalFile,
    out_file: Annotated[Path, typer.Option("--out", help="Markdown file to write.")] = Path("journal.md"),
) -> None:
    """Write the journal as Markdown."""
    from harness.evidence.journal import render_journal

    out_file.write_text(render_journal(_entries(journal)), encoding="utf-8")


def _entries(journal: Path):  # type: ignore[no-untyped-def]  # entries load when a command runs
    from harness.evidence.journal import JOURNAL, load_journal
    from harness.evidence.names import LOGS
    from harness.evidence.pack import bundle_folder

    if journal.is_file() and journal.suffix == ".jsonl":
        return load_journal(journal)
    with bundle_folder(journal) as folder:
        return load_journal(folder / LOGS / JOURNAL)
