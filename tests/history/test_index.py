"""The index holds every bundle once, reads only what is new, and is stopped by none."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.domain.errors import DeviceMissing, InputError
from harness.evidence.pack import pack_bundle
from harness.history import Index, open_index
from harness.history import index as index_module
from tests.evidence.example_run import example_plan, only, write_example
from tests.history.many_bundles import outcome, write_bundles, write_small


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with open_index(tmp_path / "index.duckdb") as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bundles"
    made.mkdir()
    return made


def test_two_hundred_bundles_are_indexed_and_then_only_new_ones_are_read(index: Index, folder: Path) -> None:
    write_bundles(folder, 200, lambda day: {})
    first = index.refresh(folder)
    assert (first.bundles, first.new, first.gone, first.copies, first.refused_count) == (200, 200, 0, 0, 0)
    assert index.rows("SELECT count(*) FROM outcome") == [(600,)]
    assert index.rows("SELECT count(*) FROM figure") == [(800,)]
    write_small(folder / "one more", day=500)
    again = index.refresh(folder)
    assert (again.bundles, again.new) == (201, 1)


def test_several_processes_give_the_same_index(
    index: Index, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundles(folder, 6, lambda day: {"ratio": 1.0 + day})
    monkeypatch.setattr(index_module, "ALONE", 2)
    monkeypatch.setattr(index_module, "BATCH", 2)
    assert index.refresh(folder, jobs=2).bundles == 6
    with open_index(tmp_path / "alone.duckdb") as alone:
        alone.refresh(folder, jobs=1)
        query = "SELECT b.*, f.* FROM figure f JOIN bundle b USING (bundle) ORDER BY ALL"
        assert index.rows(query) == alone.rows(query)


def test_a_bundle_that_changed_or_went_is_read_again_or_forgotten(index: Index, folder: Path) -> None:
    write_bundles(folder, 3, lambda day: {})
    index.refresh(folder)
    shutil.rmtree(folder / "b00001")
    shutil.rmtree(folder / "b00002")
    write_small(folder / "b00002", day=2, ratio=9.0)
    after = index.refresh(folder)
    assert (after.bundles, after.new, after.gone) == (2, 1, 1)
    assert index.rows("SELECT value FROM figure WHERE metric = 'ratio' ORDER BY value") == [(1.5,), (9.0,)]
    assert index.rows("SELECT count(*) FROM outcome") == [(6,)]


def test_a_copy_and_a_packed_copy_count_once(index: Index, folder: Path) -> None:
    plan = only(example_plan(), lambda c: c.stage == "audit")
    bundle = write_example(folder / "deep" / "er" / "bundle", plan)
    shutil.copytree(bundle, folder / "copy")
    pack_bundle(bundle, folder / "packed.tar.zst")
    found = index.refresh(folder)
    assert (found.bundles, found.copies) == (1, 2)
    shutil.rmtree(folder / "deep")
    assert index.refresh(folder).bundles == 1


def test_an_unfinished_run_a_link_and_other_files_are_no_bundles(
    index: Index, folder: Path, tmp_path: Path
) -> None:
    (folder / "running").mkdir()
    (folder / "running" / "plan.json").write_text("{}")
    outside = write_small(tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    (folder / "linked").mkdir()
    (folder / "linked" / "manifest.json").symlink_to(outside / "manifest.json")
    (folder / "readme.txt").write_text("hello")
    assert index.refresh(folder).bundles == 0


def _break_outcomes(bundle: Path) -> None:
    path = bundle / "outcomes.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1.5", b"9.5"))


def _break_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("[" * 100_000)


def _no_outcomes(bundle: Path) -> None:
    (bundle / "outcomes.jsonl").unlink()


def _pipe(bundle: Path) -> None:
    (bundle / "outcomes.jsonl").unlink()
    os.mkfifo(bundle / "outcomes.jsonl")


def _files_of_another_kind(bundle: Path) -> None:
    (bundle / "manifest.json").write_text('{"files": [1]}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_break_outcomes, "outcomes.jsonl is not the file that the manifest lists"),
        (_break_manifest, "its manifest is none"),
        (_no_outcomes, "cannot be opened"),
        (_pipe, "not a regular file"),
        (_files_of_another_kind, "its manifest is none"),
    ],
)
def test_a_damaged_bundle_is_refused_with_its_reason_and_stops_no_other(
    damage: object, words: str, index: Index, folder: Path
) -> None:
    write_bundles(folder, 3, lambda day: {})
    damage(folder / "b00001")  # type: ignore[operator]  # one of the functions above
    found = index.refresh(folder)
    assert (found.bundles, found.refused_count) == (2, 1)
    assert found.refused[0].path == "b00001"
    assert words in found.refused[0].reason
    assert index.refresh(folder).new == 0


@pytest.mark.parametrize(
    "line",
    [
        b'{"check":"sweep/x","status":"PASS"}',
        b'{"check":"../x","status":"PASS","tier":"smoke","control":null,"figures":[]}',
        b'{"check":"sweep/x","status":"PASS","tier":"smoke","control":null,'
        b'"figures":[{"name":"a","value":NaN,"low":null,"high":null}]}',
        b'{"check":"sweep/x","status":"PASS","tier":"smoke","control":null,'
        b'"figures":[{"name":"a","value":"1","low":null,"high":null}]}',
        b"\xff",
        b"",
    ],
)
def test_a_line_that_is_no_outcome_is_refused_even_where_the_manifest_binds_it(
    line: bytes, index: Index, folder: Path
) -> None:
    from harness.domain.record import sha256_hex

    bundle = write_small(folder / "b")
    content = (bundle / "outcomes.jsonl").read_bytes() + line + b"\n"
    (bundle / "outcomes.jsonl").write_bytes(content)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][0]["sha256"] = sha256_hex(content)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert "outcomes.jsonl, line 4: is no outcome" in index.refresh(folder).refused[0].reason


def test_a_number_past_32_bits_and_text_of_sql_are_kept_as_they_are(index: Index, folder: Path) -> None:
    odd = outcome("sweep/x", **{"ratio'; DROP TABLE bundle; --": 2.0**60})
    write_small(folder / "b", pr=2**40, outcomes=(odd,))
    assert index.refresh(folder).bundles == 1
    assert index.rows("SELECT pr FROM bundle") == [(2**40,)]
    assert index.rows("SELECT metric, value FROM figure") == [("ratio'; DROP TABLE bundle; --", 2.0**60)]


def test_a_folder_that_is_not_there_is_bad_input(index: Index, folder: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        index.refresh(folder / "nowhere")


def test_a_file_that_is_no_index_is_left_alone(tmp_path: Path) -> None:
    import duckdb

    text = tmp_path / "notes.duckdb"
    text.write_text("my notes " * 1000)
    with pytest.raises(InputError, match="is no index of bundles"), open_index(text):
        pass
    assert text.read_text() == "my notes " * 1000
    with pytest.raises(InputError, match=r"name ends in \.duckdb"), open_index(tmp_path / "index.json"):
        pass
    other = tmp_path / "other.duckdb"
    with duckdb.connect(str(other)) as database:
        database.execute("CREATE TABLE mine AS SELECT 42 AS answer")
    with pytest.raises(InputError, match="a database of something else"), open_index(other):
        pass
    with duckdb.connect(str(other)) as database:
        assert database.execute("SELECT answer FROM mine").fetchall() == [(42,)]


def test_an_index_of_another_version_is_made_anew(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundles(folder, 2, lambda day: {})
    with open_index(tmp_path / "i.duckdb") as index:
        index.refresh(folder)
        index.rows("UPDATE fasttrack_history SET version = 0")
    with open_index(tmp_path / "i.duckdb") as index:
        assert index.refresh(folder).new == 2


def test_an_interrupted_run_keeps_what_it_had_read(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundles(folder, 4, lambda day: {})
    monkeypatch.setattr(index_module, "BATCH", 2)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_index(tmp_path / "i.duckdb") as index:
        index.refresh(folder, interrupt)
    with open_index(tmp_path / "i.duckdb") as index:
        assert index.refresh(folder).new == 2


def test_without_duckdb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "duckdb", None)
    with (
        pytest.raises(DeviceMissing, match=r"pip install 'fasttrack\[history\]'"),
        open_index(tmp_path / "i.duckdb"),
    ):
        pass
