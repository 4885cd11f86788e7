"""Files that are no text: what is taken for evidence or data, and what is not."""

import gzip
import io
import json
from pathlib import Path

import numpy
import pytest

from harness.stages.isolation.evidence_files import is_plain_data, why_no_evidence

BUNDLE = Path(__file__).parents[3] / "bundles/k3_decode/h200-layers-kda.tar.zst"


def tensors(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def arrays(**named: numpy.ndarray) -> bytes:
    out = io.BytesIO()
    numpy.savez_compressed(out, **named)  # type: ignore[arg-type]  # its stub wants no named arrays
    return out.getvalue()


def test_a_bundle_that_verifies_is_evidence_and_one_changed_byte_makes_it_none() -> None:
    content = BUNDLE.read_bytes()
    assert why_no_evidence("bundles/x.tar.zst", content) is None
    middle = len(content) // 2
    spoiled = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    assert why_no_evidence("bundles/x.tar.zst", spoiled) is not None


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("x.tar.zst", b"\x28\xb5\x2f\xfdpayload", "it is no bundle"),
        ("x.bin", b"\x7fELF", "neither a packed bundle"),
        ("x.safetensors", b"\xff" * 20, "longer than the file"),
        ("x.safetensors", tensors({"a": {"data_offsets": [0, 4]}}, b"1234ELF"), "belong to no tensor"),
        ("x.safetensors", tensors({"a": {"data_offsets": [2, 4]}}, b"1234"), "leaves bytes out"),
        ("x.npz", arrays(a=numpy.array([{}], dtype=object)), "is no array of numbers"),
        ("x.npz", b"PK\x03\x04junk", "no archive of arrays"),
        ("x.npz", None, "more bytes than can be read"),
        ("x.json.gz", gzip.compress(b"\x7fELF", mtime=0), "no compressed JSON"),
        ("x.json.gz", gzip.compress(b"{}", mtime=0) + b"\x7fELF", "goes on after its end"),
        ("x.jsonl.gz", gzip.compress(b"{}\n{}\n", mtime=0)[:-9], "is cut off"),
        ("x.jsonl.gz", gzip.compress(bytes(33 * 2**20), mtime=0), "unpacks to over"),
    ],
)
def test_anything_else_is_named_for_what_is_wrong_with_it(
    path: str, content: bytes | None, words: str
) -> None:
    found = why_no_evidence(path, content)
    assert found is not None
    assert words in found


def test_compressed_records_are_evidence_and_no_data_for_a_model() -> None:
    lines = gzip.compress(b'{"us": 1.5}\n{"us": 1.6}\n')
    assert why_no_evidence("bundles/x.jsonl.gz", lines) is None
    assert why_no_evidence("bundles/x.json.gz", gzip.compress(b"[1, 2]", mtime=0)) is None
    assert why_no_evidence("bundles/x.json.gz", lines) is not None
    assert not is_plain_data("bundles/x.jsonl.gz", lines)


def test_tensors_and_arrays_of_numbers_are_data() -> None:
    assert is_plain_data("x.safetensors", tensors({"a": {"data_offsets": [0, 4]}}, b"1234"))
    assert is_plain_data("x.npz", arrays(a=numpy.zeros((3, 4), dtype=numpy.float16), b=numpy.arange(3)))
    assert not is_plain_data("x.tar.zst", BUNDLE.read_bytes())
