"""One file for a bundle, and unpacking a hostile one."""

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.domain.bundle import BundleState
from harness.domain.errors import EvidenceError, InputError
from harness.evidence.pack import bundle_folder, own_copy, pack_bundle, read_packed, unpack_bundle
from harness.evidence.verify import verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import example_plan, only, write_example

Entry = tuple[tarfile.TarInfo, bytes]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = only(example_plan(), lambda c: c.stage == "audit")
    return write_example(tmp_path_factory.mktemp("pack") / "bundle", plan)


def _entry(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "") -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    return info, content


def _archive(path: Path, entries: Iterable[Entry]) -> Path:
    raw = io.BytesIO()
    for info, content in entries:
        raw.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
        raw.write(content[: info.size] + bytes(-info.size % 512))
    raw.write(bytes(1024))
    path.write_bytes(zstandard.ZstdCompressor().compress(raw.getvalue()))
    return path


def test_a_bundle_survives_packing_and_unpacking(bundle: Path, tmp_path: Path) -> None:
    archive = pack_bundle(bundle, tmp_path / "b.tar.zst")
    folder = unpack_bundle(archive, tmp_path / "out")
    assert verify(folder, judge).state is BundleState.VERIFIED
    assert verify(folder).bundle_digest == verify(bundle).bundle_digest


def test_packing_twice_gives_the_same_bytes_whatever_the_files_times_and_modes(
    bundle: Path, tmp_path: Path
) -> None:
    first = pack_bundle(bundle, tmp_path / "first.tar.zst").read_bytes()
    again = unpack_bundle(tmp_path / "first.tar.zst", tmp_path / "again")
    for path in again.rglob("*"):
        path.chmod(0o700)
    assert pack_bundle(again, tmp_path / "second.tar.zst").read_bytes() == first


def test_other_tools_can_read_a_packed_bundle(bundle: Path, tmp_path: Path) -> None:
    archive = pack_bundle(bundle, tmp_path / "b.tar.zst")
    content = zstandard.ZstdDecompressor().decompress(archive.read_bytes(), max_output_size=2**24)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames()[0] == "manifest.json"
        assert {m.mtime for m in tar.getmembers()} == {0}


def test_an_existing_file_or_folder_is_never_overwritten(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "b.tar.zst").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        pack_bundle(bundle, tmp_path / "b.tar.zst")
    (tmp_path / "b.tar.zst").unlink()
    pack_bundle(bundle, tmp_path / "b.tar.zst")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already"):
        unpack_bundle(tmp_path / "b.tar.zst", tmp_path / "out")


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (_entry("../evil"), "leaves or repeats"),
        (_entry("/tmp/evil"), "is absolute"),
        (_entry("logs/../../evil"), "leaves or repeats"),
        (_entry("logs/link", kind=tarfile.SYMTYPE, link="/etc/passwd"), "special entry"),
        (_entry("logs/link", kind=tarfile.LNKTYPE, link="plan.json"), "special entry"),
        (_entry("logs/device", kind=tarfile.CHRTYPE), "special entry"),
        (_entry("logs/pipe", kind=tarfile.FIFOTYPE), "special entry"),
        (_entry("logs/folder", kind=tarfile.DIRTYPE), "special entry"),
        (_entry("logs/sparse", kind=tarfile.GNUTYPE_SPARSE), "special entry"),
        (_entry("logs/pax", kind=tarfile.XHDTYPE), "special entry"),
        (_entry("logs/long", kind=tarfile.GNUTYPE_LONGNAME), "special entry"),
        (_entry("logs/caf\u00e9"), "no packed bundle"),
    ],
)
def test_a_hostile_entry_stops_unpacking_and_leaves_nothing(tmp_path: Path, entry: Entry, word: str) -> None:
    archive = _archive(tmp_path / "evil.tar.zst", [_entry("plan.json"), entry])
    with pytest.raises(EvidenceError, match=word):
        unpack_bundle(archive, tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_two_entries_of_one_name_or_one_name_in_two_cases_are_refused(tmp_path: Path) -> None:
    twice = _archive(tmp_path / "twice.tar.zst", [_entry("plan.json"), _entry("plan.json")])
    with pytest.raises(EvidenceError, match="exists"):
        unpack_bundle(twice, tmp_path / "out")
    cases = _archive(tmp_path / "cases.tar.zst", [_entry("logs/a"), _entry("logs/A")])
    with pytest.raises(EvidenceError, match="one file on some systems"):
        unpack_bundle(cases, tmp_path / "out")


def test_a_decompression_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "bomb.tar.zst", [_entry("logs/zero", bytes(80 * 2**20))])
    assert archive.stat().st_size < 2**17
    with pytest.raises(EvidenceError, match="unpacks to over"):
        unpack_bundle(archive, tmp_path / "out")
    with pytest.raises(EvidenceError, match="unpacks to over"):
        unpack_bundle(
            _archive(tmp_path / "big.tar.zst", [_entry("plan.json", bytes(5000))]), tmp_path / "out", 4096
        )


def test_a_header_that_declares_more_than_it_brings_is_cut_off(tmp_path: Path) -> None:
    info, _ = _entry("logs/x")
    info.size = 10_000
    with pytest.raises(EvidenceError, match="cut off"):
        unpack_bundle(_archive(tmp_path / "short.tar.zst", [(info, b"x")]), tmp_path / "out")


def _append(content: bytes) -> bytes:
    return content + b"more"


def _cut(content: bytes) -> bytes:
    return content[:-20]


def _second_frame(content: bytes) -> bytes:
    return content + zstandard.ZstdCompressor().compress(b"x" * 2000)


@pytest.mark.parametrize("change", [_append, _cut, _second_frame, lambda c: b"", lambda c: b"not zstd"])
def test_a_damaged_archive_is_refused(bundle: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    archive = pack_bundle(bundle, tmp_path / "b.tar.zst")
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(EvidenceError):
        unpack_bundle(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=1600))
def test_no_bytes_make_unpacking_fail_in_any_other_way(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    (root / "x.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(raw))
    try:
        unpack_bundle(root / "x.tar.zst", root / "out")
    except EvidenceError:
        assert sorted(p.name for p in root.iterdir()) == ["x.tar.zst"]


def test_a_packed_bundle_is_opened_for_a_while_and_removed(bundle: Path, tmp_path: Path) -> None:
    archive = pack_bundle(bundle, tmp_path / "pr-1.tar.zst")
    with bundle_folder(archive) as folder:
        assert folder.name == "pr-1"
        assert (folder / "plan.json").is_file()
    assert not folder.exists()
    with bundle_folder(bundle) as folder:
        assert folder == bundle
    with pytest.raises(InputError, match="no bundle here"), bundle_folder(tmp_path / "nothing"):
        pass


def test_some_files_are_read_out_of_a_packed_bundle_without_unpacking_it(
    bundle: Path, tmp_path: Path
) -> None:
    archive = pack_bundle(bundle, tmp_path / "b.tar.zst")
    read = read_packed(archive, {"manifest.json": 2**20, "outcomes.jsonl": 2**20, "attestation.json": 9})
    assert read == {name: (bundle / name).read_bytes() for name in ("manifest.json", "outcomes.jsonl")}
    assert [p.name for p in tmp_path.iterdir()] == ["b.tar.zst"]


def test_a_file_over_its_limit_or_twice_in_the_archive_is_not_read(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "b.tar.zst", [_entry("plan.json", b"12345")])
    with pytest.raises(EvidenceError, match=r"'plan.json' is over the size limit"):
        read_packed(archive, {"plan.json": 4})
    twice = _archive(tmp_path / "t.tar.zst", [_entry("plan.json", b"1"), _entry("plan.json", b"2")])
    with pytest.raises(EvidenceError, match=r"holds 'plan\.json' twice"):
        read_packed(twice, {"plan.json": 4, "manifest.json": 4})


@pytest.mark.parametrize(("change", "word"), [(_cut, "cut off"), (lambda content: content[:9], "cut off")])
def test_a_damaged_archive_is_not_read(
    bundle: Path, tmp_path: Path, change: Callable[[bytes], bytes], word: str
) -> None:
    archive = pack_bundle(bundle, tmp_path / "b.tar.zst")
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(EvidenceError, match=word):
        read_packed(archive, {"no_such_file.json": 9})


def test_an_archive_with_two_names_is_copied_and_opened_under_the_name_it_was_given_by(
    bundle: Path, tmp_path: Path
) -> None:
    archive = pack_bundle(bundle, tmp_path / "one.tar.zst")
    (tmp_path / "two.tar.zst").hardlink_to(archive)
    with own_copy(archive) as own, bundle_folder(own or archive, shown=archive) as folder:
        assert (folder / "plan.json").read_bytes() == (bundle / "plan.json").read_bytes()
    notes = tmp_path / "notes.txt"
    notes.write_text("no bundle")
    with (
        own_copy(notes) as own,
        pytest.raises(EvidenceError, match=f"^{notes}: is no packed bundle"),
        bundle_folder(own or notes, shown=notes),
    ):
        pass


def test_a_folder_without_plan_or_manifest_is_told_as_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bundle lies in this folder"), bundle_folder(tmp_path):
        pass
