"""Every reader of a bundle under damage: an answer in words, no crash, no hang, no write elsewhere.

Systematic all over small files, drawn by Hypothesis where that would be too much. `fuzz_readers.py` runs the
same readers under Atheris for as long as one likes.
"""

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.domain.bundle import BundleState, Manifest, SamplesHeader
from harness.domain.check import Outcome
from harness.domain.errors import EvidenceError, FasttrackError
from harness.domain.plan import Plan
from harness.evidence.attestation import sign_bundle
from harness.evidence.pack import pack_bundle, read_packed, unpack_bundle
from harness.evidence.reader import open_bundle
from harness.evidence.strict_json import parse_json, parse_record
from harness.evidence.tables import read_table
from harness.evidence.verify import verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_plan, only, write_example

KEPT = ("audit/attn_res/sm_90a", "isolation/zones/change")
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed bundle of two checks."""
    root = tmp_path_factory.mktemp("fuzz")
    folder = write_example(root / "small", only(example_plan(), lambda c: c.id in KEPT))
    sign_bundle(folder, Ed25519PrivateKey.from_private_bytes(bytes(32)))
    return folder


@pytest.fixture
def bundle(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "bundle"))


def _damages(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Cuts, flips, repeats and swaps all over the content."""
    step = max(1, len(content) // 6)
    for place in range(0, len(content), step):
        yield content[:place]
        yield content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
        yield content[:place] + bytes(rng.randrange(256) for _ in range(4)) + content[place:]
    yield content + content
    yield content[::-1]


def test_no_damage_to_any_file_of_a_bundle_is_a_crash_or_goes_unnoticed(bundle: Path) -> None:
    rng = random.Random(7)
    outside = sorted(p.name for p in bundle.parent.iterdir())
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for damaged in _damages(content, rng):
            path.write_bytes(damaged)
            result = verify(bundle, judge, as_planned)
            assert result.state is not BundleState.VERIFIED or damaged == content, path.name
            _refusal(lambda: open_bundle(bundle))
        path.write_bytes(content)
    assert verify(bundle, judge, as_planned).state is BundleState.VERIFIED
    assert sorted(p.name for p in bundle.parent.iterdir()) == outside


def test_every_cut_and_a_flip_of_every_byte_of_a_packed_bundle_is_refused_or_changes_nothing(
    small: Path, tmp_path: Path
) -> None:
    archive = pack_bundle(small, tmp_path / "whole.tar.zst")
    content, rng = archive.read_bytes(), random.Random(3)
    damaged = tmp_path / "damaged.tar.zst"
    step = max(1, len(content) // 120)
    for place in range(0, len(content), step):
        flipped = content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
        for bad in (content[:place], flipped):
            damaged.write_bytes(bad)
            for read in (_unpacked, _peeked):
                words = _refusal(partial(read, damaged, small))
                assert words is None or str(damaged) in words
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.tar.zst", "whole.tar.zst"]


def _refusal(read: Callable[[], object]) -> str | None:
    """The words in which a reader refused, None where it gave an answer; anything else is a crash."""
    try:
        read()
    except FasttrackError as error:
        return str(error)
    return None


def _unpacked(damaged: Path, small: Path) -> None:
    folder = damaged.with_name("unpacked")
    try:
        unpack_bundle(damaged, folder)
        for path in folder.rglob("*"):  # zstd's checksum lets nothing changed through
            assert path.is_dir() or path.read_bytes() == (small / path.relative_to(folder)).read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _peeked(damaged: Path, small: Path) -> None:
    for name, raw in read_packed(damaged, {"manifest.json": 10**6, "outcomes.jsonl": 10**6}).items():
        assert len(raw) <= 10**6, name


@QUICK
@given(
    names=st.lists(st.text(st.characters(max_codepoint=0x17F), min_size=1, max_size=60), max_size=4),
    kinds=st.lists(st.sampled_from(list(b"01234567gxLK")), min_size=4, max_size=4),
    sizes=st.lists(st.integers(-1, 3000), min_size=4, max_size=4),
    body=st.binary(max_size=700),
)
def test_a_tar_of_any_entries_is_unpacked_inside_its_folder_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    kinds: list[int],
    sizes: list[int],
    body: bytes,
) -> None:
    root = tmp_path_factory.mktemp("tar")
    raw = io.BytesIO()
    for name, kind, size in zip(names, kinds, sizes, strict=False):
        entry = tarfile.TarInfo(name[:90])
        entry.type, entry.size = bytes([kind]), max(0, size)
        entry.linkname = "../../outside"
        try:
            raw.write(entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
        except ValueError:
            continue
        raw.write(body + bytes(-len(body) % 512))
    archive = root / "any.tar.zst"
    archive.write_bytes(zstandard.ZstdCompressor().compress(raw.getvalue() + bytes(1024)))
    try:
        unpack_bundle(archive, root / "out")
    except EvidenceError:
        assert not (root / "out").exists()
    assert {p.name for p in root.iterdir()} <= {"any.tar.zst", "out"}
    assert not any(p.is_symlink() for p in root.rglob("*"))


@QUICK
@given(JSON)
def test_any_json_is_a_record_or_refused_in_words(value: Any) -> None:
    raw = json.dumps(value).encode()
    for kind in (Manifest, Plan, Outcome, SamplesHeader):
        with pytest.raises(EvidenceError):
            parse_record(raw, kind)


@QUICK
@given(st.text('[]{}",:0123456789.eE+-truefalsn\\ \u00e9', max_size=80))
def test_text_that_looks_like_json_is_parsed_or_refused_in_words(text: str) -> None:
    assert _refusal(lambda: parse_json(text.encode())) != ""


@pytest.mark.parametrize("kind", [Manifest, Plan, Outcome], ids=lambda kind: kind.__name__)
def test_a_record_with_any_field_of_another_type_missing_or_more_is_refused(
    small: Path, kind: type[Manifest] | type[Plan] | type[Outcome]
) -> None:
    name = {"Manifest": "manifest.json", "Plan": "plan.json", "Outcome": "outcomes.jsonl"}[kind.__name__]
    good = json.loads((small / name).read_bytes().splitlines()[0])
    kind.model_validate_json(json.dumps(good), strict=True)
    for field in good:
        for wrong in ([], {}, "\u202e", -1, 1e308, True, None, [[]] * 50):
            if wrong == good[field] or type(wrong) is type(good[field]):
                continue
            with pytest.raises(EvidenceError):
                parse_record(json.dumps({**good, field: wrong}).encode(), kind)
    with pytest.raises(EvidenceError):
        parse_record(json.dumps({**good, "more": 1}).encode(), kind)


@QUICK
@given(
    place=st.integers(0, 10**6),
    bits=st.integers(1, 255),
    cut=st.integers(0, 10**6),
    tail=st.binary(max_size=40),
)
def test_a_damaged_parquet_file_is_read_within_limits_or_refused(
    small: Path, tmp_path_factory: pytest.TempPathFactory, place: int, bits: int, cut: int, tail: bytes
) -> None:
    content = bytearray(next(small.rglob("*.parquet")).read_bytes())
    content[place % len(content)] ^= bits
    path = tmp_path_factory.mktemp("parquet") / "t.parquet"
    path.write_bytes(bytes(content[: len(content) - cut % 3 * (cut % len(content))]) + tail)
    words = _refusal(lambda: read_table(path, "kernels"))
    assert words is None or str(path) in words


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": pa.array([1, 2], pa.int8())}),
        pa.table({"a": pa.array([[1.0]] * 3)}),
        pa.table({"a": pa.array([{"b": 1}])}),
        pa.table({"a": pa.array([b"\xff"])}),
        pa.table({"a": pa.array([float("inf")])}),
        pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]),
        pa.table({f"c{n}": pa.array([1]) for n in range(600)}),
    ],
    ids=["int8", "list", "struct", "binary", "infinite", "twice", "wide"],
)
def test_parquet_that_no_writer_of_ours_makes_is_refused(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "t.parquet", store_schema=False)
    words = _refusal(lambda: read_table(tmp_path / "t.parquet", "t"))
    assert words is not None
    assert "t.parquet" in words
