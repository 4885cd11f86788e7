"""A journal can be appended to, and nothing else: any other change is noticed where it is."""

from pathlib import Path

import pytest

from harness.domain.check import Status
from harness.domain.errors import EvidenceError
from harness.domain.journal import FIRST, AttemptResult, CheckRow
from harness.evidence.journal import JOURNAL, append_entry, load_journal, put_journal, render_journal


def attempt(number: int, *, accepted: bool) -> AttemptResult:
    row = CheckRow(check="kernels/mix/nano/cell", status=Status.FAIL, summary="error above its bound")
    return AttemptResult(
        attempt=number, accepted=accepted, stage="accepted" if accepted else "tests", words="as it was",
        next_step="go on", tests=(row,),
    )  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.jsonl"
    append_entry(path, kind="begun", op="mix", words="on a CPU")
    append_entry(path, kind="attempt", op="mix", question="why <slow>?", result=attempt(1, accepted=False))
    append_entry(path, kind="attempt", op="mix", predicted="2x", result=attempt(2, accepted=True))
    return path


def test_each_entry_carries_the_digest_of_the_one_before(journal: Path) -> None:
    first, second, third = load_journal(journal)
    assert (first.previous, second.previous, third.previous) == (FIRST, first.digest(), second.digest())


def test_a_rewritten_entry_is_noticed_at_the_next_line(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes().replace(b"why <slow>?", b"why <fast>?"))
    with pytest.raises(EvidenceError, match=r"journal\.jsonl:3: this entry does not follow"):
        load_journal(journal)


def test_an_entry_that_was_taken_out_is_noticed(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[2])
    with pytest.raises(EvidenceError, match=r"journal\.jsonl:2: this entry does not follow"):
        load_journal(journal)


def test_a_torn_last_line_is_named(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-5])
    with pytest.raises(EvidenceError, match="its last line is torn; it counts up to entry 1"):
        load_journal(journal)


def test_only_a_journal_whose_chain_holds_gets_among_a_bundles_logs(journal: Path, tmp_path: Path) -> None:
    put_journal(tmp_path / "logs", journal)
    assert load_journal(tmp_path / "logs" / JOURNAL) == load_journal(journal)
    journal.write_bytes(journal.read_bytes().replace(b"2x", b"9x"))
    append = journal.read_bytes()
    journal.write_bytes(append + append.splitlines(keepends=True)[0])
    with pytest.raises(EvidenceError):
        put_journal(tmp_path / "other", journal)


def test_the_export_counts_attempts_and_shows_no_markup_of_an_agent(journal: Path) -> None:
    text = render_journal(load_journal(journal))
    assert text.startswith("# Attempts at mix\n\n2 attempts, 1 accepted.\n")
    assert "- question: why &lt;slow>?\n" in text
    assert "## Attempt 1: rejected at tests\n" in text
    assert "## Attempt 2: accepted\n" in text
