"""JSON that somebody else wrote."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.domain.errors import EvidenceError
from harness.domain.machine import Gpu
from harness.evidence.strict_json import load_record, parse_json, parse_record

GPU = b'{"arch":"sm_90a","memory_bytes":1,"name":"H200","sm_count":null}'


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e999}', "out of range"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":{"b":1,"b":1}}', "twice"),
        (b"[" * 41 + b"]" * 41, "41 levels"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":1', "not JSON"),
        (b"[" + b"1" * 5000 + b"]", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_json_that_two_readers_could_see_differently_is_refused(raw: bytes, word: str) -> None:
    with pytest.raises(EvidenceError, match=word):
        parse_json(raw)


def test_brackets_inside_text_are_no_nesting() -> None:
    assert parse_json(b'["' + b"[" * 100 + b'"]') == ["[" * 100]


def test_a_hundred_thousand_brackets_are_refused_before_a_parser_recurses() -> None:
    with pytest.raises(EvidenceError, match="100000 levels"):
        parse_json(b"[" * 100_000)


def test_canonical_json_gives_its_record() -> None:
    assert parse_record(GPU, Gpu) == Gpu(name="H200", arch="sm_90a", memory_bytes=1)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (GPU.replace(b":1,", b": 1,"), "canonical"),
        (GPU.replace(b":1,", b":1.0,"), "canonical"),
        (GPU.replace(b":1,", b':"1",'), "memory_bytes"),
        (GPU.replace(b'"sm_count":null', b'"sm_count":null,"x":1'), "x"),
        (GPU.replace(b'"H200"', b'"\\ud800"'), "canonical"),
        (b"null", "Gpu"),
    ],
)
def test_a_record_of_other_spelling_types_or_fields_is_refused(raw: bytes, word: str) -> None:
    with pytest.raises(EvidenceError, match=word):
        parse_record(raw, Gpu)


def test_a_file_over_its_limit_or_behind_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(GPU)
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(EvidenceError, match="10 bytes"):
        load_record(path, Gpu, 10)
    with pytest.raises(EvidenceError, match=r"link\.json"):
        load_record(tmp_path / "link.json", Gpu, 1000)


@given(
    st.binary(max_size=200)
    | st.text(alphabet='[]{}",:0123456789.eE-+\\ntrufalsNIy', max_size=60).map(str.encode)
)
def test_no_bytes_make_the_reader_fail_in_any_other_way(raw: bytes) -> None:
    with contextlib.suppress(EvidenceError):
        parse_json(raw)
