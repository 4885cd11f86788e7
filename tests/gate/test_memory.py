"""Verifications that are remembered: when one is taken, and when never."""

import os
import shutil
from datetime import date
from pathlib import Path

import pytest

from harness.cli import gate as gate_command
from harness.cli.gate import submission_of
from harness.domain.check import Check, Outcome, Samples
from harness.domain.errors import InputError
from harness.evidence.pack import pack_bundle
from harness.gate import memory as memory_module
from harness.gate.memory import Memory, open_memory, recall, remember
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_plan, only, write_example
from tests.evidence.tampering import rehash

CODE = "c" * 64


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = only(example_plan(), lambda c: c.stage in ("isolation", "kernels"))
    return write_example(tmp_path_factory.mktemp("memory") / "bundle", plan)


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "bundle"))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(memory_module, "_code_digest", lambda *days: CODE)
    return open_memory(tmp_path / "memory")


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checks that were judged, each time again."""
    seen: list[str] = []

    def counting(check: Check, samples: Samples) -> Outcome | None:
        seen.append(check.id)
        return judge(check, samples)

    monkeypatch.setattr(gate_command, "judge_of", lambda folder: counting)
    monkeypatch.setattr(gate_command, "replan_of", lambda: as_planned)
    return seen


def test_a_bundle_that_was_verified_before_is_taken_as_it_was_found(
    bundle: Path, memory: Memory, judged: list[str]
) -> None:
    first = submission_of(bundle, "mine", memory)
    count = len(judged)
    assert count > 5
    assert submission_of(bundle, "mine", memory) == first
    assert submission_of(bundle, "other", memory).name == "other"
    assert len(judged) == count


def test_an_archive_is_known_by_its_own_bytes(bundle: Path, memory: Memory, judged: list[str]) -> None:
    archive = pack_bundle(bundle, bundle.with_name("bundle.tar.zst"))
    first = submission_of(archive, "mine", memory)
    count = len(judged)
    assert submission_of(archive, "mine", memory) == first
    assert len(judged) == count
    archive.write_bytes(archive.read_bytes()[:-1] + b"\0")
    assert memory.key(archive) != memory.key(bundle)


def test_one_byte_of_any_file_makes_a_bundle_unknown(bundle: Path, memory: Memory) -> None:
    known = memory.key(bundle)
    assert known is not None
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert memory.key(bundle) != known, path
        path.write_bytes(content)
    (bundle / "logs" / "more.log").write_text("unlisted")
    assert memory.key(bundle) is None


def test_an_edit_with_a_fitting_manifest_is_judged_anew(
    bundle: Path, memory: Memory, judged: list[str]
) -> None:
    submission_of(bundle, "mine", memory)
    count = len(judged)
    (bundle / "logs" / "more.log").write_text("listed now")
    rehash(bundle)
    submission_of(bundle, "mine", memory)
    assert len(judged) == 2 * count


def test_another_harness_library_or_day_knows_nothing(bundle: Path, memory: Memory) -> None:
    later = Memory(memory.folder, "d" * 64)
    assert memory.key(bundle) != later.key(bundle)


def test_the_code_that_decides_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    of = memory_module._code_digest.__wrapped__
    today, tomorrow = date(2026, 11, 29), date(2026, 11, 30)
    before = of(today)
    assert of(today) == before
    assert of(tomorrow) != before
    for name, value in (
        ("harness_digest", lambda: "0" * 64),
        ("_pack_words", lambda name: "other"),
        ("source_digest", lambda folder: "0" * 64),
        ("_version", lambda library: "0.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(memory_module, name, value)
            assert of(today) != before, name


def test_an_entry_under_another_name_or_cut_off_is_not_taken(
    bundle: Path, memory: Memory, judged: list[str]
) -> None:
    submission_of(bundle, "mine", memory)
    (entry,) = memory.folder.iterdir()
    forged = memory.folder / f"{'e' * 64}.json"
    entry.rename(forged)
    assert recall(memory, "e" * 64, "mine") is None
    forged.write_bytes(forged.read_bytes()[:100])
    assert recall(memory, "e" * 64, "mine") is None


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InputError, match="others can write here"):
        open_memory(tmp_path / "open")
    assert open_memory(tmp_path / "new" / "own").folder.stat().st_mode & 0o777 == 0o700


def test_the_oldest_entries_go_first(
    bundle: Path, memory: Memory, judged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "MAX_ENTRIES", 2)
    submission = submission_of(bundle, "mine")
    for number, key in enumerate(("1" * 64, "2" * 64, "3" * 64)):
        remember(memory, key, submission)
        entry = memory.folder / f"{key}.json"
        os.utime(entry, (number, number))
    kept = sorted(path.name[0] for path in memory.folder.iterdir())
    assert kept == ["2", "3"]
