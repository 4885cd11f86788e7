"""Verifications that are remembered: when one is taken, and when never."""

import ctypes
import os
import shutil
import threading
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from harness.cli import gate as gate_command
from harness.cli.gate import submission_of
from harness.domain.bundle import BundleState
from harness.domain.check import Check, Outcome, Samples
from harness.domain.errors import InputError
from harness.evidence.pack import pack_bundle
from harness.gate import memory as memory_module
from harness.gate import submission as gate_submission
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


def test_bundles_that_are_swapped_all_the_time_are_remembered_as_what_was_read(
    pristine: Path, tmp_path: Path, memory: Memory, judged: list[str]
) -> None:
    one, two = (Path(shutil.copytree(pristine, tmp_path / name)) for name in ("one", "two"))
    (two / "logs" / "more.log").write_text("another bundle")
    rehash(two)
    wanted = {memory.key(place): submission_of(place, "x").verification.bundle_digest for place in (one, two)}
    stop, exchange = threading.Event(), 2
    rename = ctypes.CDLL(None).renameat2

    def swap() -> None:
        while not stop.wait(0.001):
            assert rename(-100, os.fsencode(one), -100, os.fsencode(two), exchange) == 0

    swapper = threading.Thread(target=swap)
    swapper.start()
    answers: set[str] = set()
    try:
        for _ in range(30):
            try:
                answers.add(submission_of(one, "mine", memory).verification.state.value)
            except InputError:
                answers.add("changed")
    finally:
        stop.set()
        swapper.join()
    assert answers
    for key, digest in wanted.items():
        found = recall(memory, key or "", "mine")
        assert found is None or found.verification.bundle_digest == digest
        assert found is None or found.verification.state is BundleState.VERIFIED
    assert {path.stem for path in memory.folder.iterdir()} <= wanted.keys()


def test_what_takes_the_place_of_a_bundle_during_its_verification_is_not_what_is_judged(
    pristine: Path, bundle: Path, memory: Memory, judged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(pristine, bundle.with_name("other")))
    (other / "logs" / "more.log").write_text("another bundle")
    rehash(other)
    key, load = memory.key(bundle), gate_submission.load_submission

    def swapped(folder: Path, *given: Any) -> Any:
        bundle.rename(bundle.with_name("aside"))
        other.rename(bundle)
        found = load(folder, *given)
        bundle.rename(other)
        bundle.with_name("aside").rename(bundle)
        return found

    monkeypatch.setattr(gate_submission, "load_submission", swapped)
    found = submission_of(bundle, "mine", memory)
    monkeypatch.setattr(gate_submission, "load_submission", load)
    assert key is not None
    assert found == recall(memory, key, "mine") == submission_of(bundle, "mine")


def test_a_link_or_a_pipe_in_a_bundle_is_found_in_its_copy_too(bundle: Path, memory: Memory) -> None:
    (bundle / "logs" / "linked.log").symlink_to("/etc/hostname")
    os.mkfifo(bundle / "logs" / "pipe.log")
    found = submission_of(bundle, "mine", memory).verification
    assert found.state is BundleState.BROKEN
    assert sorted(p.path for p in found.problems) == ["logs/linked.log", "logs/pipe.log"]
    assert list(memory.folder.iterdir()) == []


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
