"""Files that are no text and still no code: a packed bundle that verifies, plain tensors, compressed records.

Invariant: nothing of such a file is run, and what it says of itself is not believed: a bundle is unpacked
under limits and every digest of it compared, a tensor file must hold the bytes that its header lists and no
others, and what is compressed must be JSON to its last byte.
"""

import io
import json
import re
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Final

from harness.domain.errors import EvidenceError
from harness.evidence.pack import unpack_bundle
from harness.evidence.verify import verify

__all__ = ["is_plain_data", "why_no_evidence"]

MAX_UNPACKED_BYTES: Final = 512 * 2**20
MAX_RECORD_BYTES: Final = 32 * 2**20
MAX_HEADER: Final = 4 * 2**20
HEADER_BYTES: Final = 8
MAX_ARRAY_HEADER: Final = 4096
RECORDS: Final = (".json.gz", ".jsonl.gz")
GZIP: Final = 31
"""What zlib is asked for: one gzip member with its check sum."""
ARRAY: Final = re.compile(
    rb"\x93NUMPY[\x01-\x03]\x00.{2,4}?\{'descr': '[<>|=][biufcV?][0-9]{1,2}', 'fortran_order': (True|False), "
    rb"'shape': \([0-9, ]*\), \}", re.DOTALL,
)  # fmt: skip
"""The header that numpy writes for an array of numbers; one of objects, which are pickled, says `O`."""


def why_no_evidence(path: str, content: bytes | None) -> str | None:
    """What is wrong with a file that should be a bundle or tensors; None where it is one."""
    if content is None:
        return "it has more bytes than can be read"
    if path.endswith(".tar.zst"):
        return _bundle_problem(content)
    if path.endswith(".safetensors"):
        return _tensor_problem(content)
    if path.endswith(".npz"):
        return _arrays_problem(content)
    if path.endswith(RECORDS):
        return _record_problem(content, is_lines=path.endswith(".jsonl.gz"))
    return "it is neither a packed bundle, nor a file of tensors or arrays, nor compressed JSON"


def is_plain_data(path: str, content: bytes | None) -> bool:
    """Whether a file holds tensors or arrays of numbers and nothing else."""
    return path.endswith((".safetensors", ".npz")) and why_no_evidence(path, content) is None


def _bundle_problem(content: bytes) -> str | None:
    with tempfile.TemporaryDirectory(prefix="fasttrack-evidence-") as scratch:
        archive = Path(scratch) / "bundle.tar.zst"
        archive.write_bytes(content)
        try:
            result = verify(unpack_bundle(archive, Path(scratch) / "bundle", MAX_UNPACKED_BYTES))
        except EvidenceError as error:
            return f"it is no bundle ({str(error).removeprefix(str(archive))[:200].lstrip(': ')})"
    wrong = [f"{step.name}: {step.problems[0].message}" for step in result.steps if step.problems]
    if wrong:
        return f"as a bundle it does not verify ({'; '.join(wrong)[:300]})"
    return None if result.bundle_digest is not None else "the run in it has not finished"


def _arrays_problem(content: bytes) -> str | None:
    """Every entry a plain array of numbers: no pickled objects, no other files, nothing too large."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if not entries or sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
                return "it holds nothing, or unpacks to too much"
            for entry in entries:
                with archive.open(entry) as file:
                    head = file.read(MAX_ARRAY_HEADER)
                found = ARRAY.match(head) if entry.filename.endswith(".npy") else None
                if found is None:
                    return f"its entry {entry.filename[:80]!r} is no array of numbers"
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        return f"it is no archive of arrays ({str(error)[:100]})"
    return None


def _record_problem(content: bytes, is_lines: bool) -> str | None:
    """One gzip member of JSON, or of JSON lines, and nothing behind it."""
    unpacker = zlib.decompressobj(GZIP)
    try:
        text = unpacker.decompress(content, MAX_RECORD_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            return f"it unpacks to over {MAX_RECORD_BYTES} bytes, is cut off, or goes on after its end"
        for part in text.decode("utf-8").splitlines() if is_lines else (text,):
            json.loads(part)
    except (zlib.error, ValueError, RecursionError) as error:
        return f"it is no compressed JSON ({str(error)[:100]})"
    return None


def _tensor_problem(content: bytes) -> str | None:
    size = int.from_bytes(content[:HEADER_BYTES], "little")
    if len(content) < HEADER_BYTES or size > min(MAX_HEADER, len(content) - HEADER_BYTES):
        return "its header is longer than the file"
    try:
        header = json.loads(content[HEADER_BYTES : HEADER_BYTES + size])
        spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its header is no list of tensors"
    end = 0
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and span[0] == end and isinstance(span[1], int)):
            return "its header leaves bytes out, or lists some twice"
        end = span[1]
    if end != len(content) - HEADER_BYTES - size:
        return "it holds bytes that belong to no tensor"
    return None
