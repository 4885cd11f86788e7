"""Files that are no text and still no code: a packed bundle that verifies, and a file of plain tensors.

Invariant: nothing of such a file is run, and what it says of itself is not believed: a bundle is unpacked
under limits and every digest of it compared, and a tensor file must hold the bytes that its header lists
and no others.
"""

import json
import tempfile
from pathlib import Path
from typing import Final

from harness.domain.errors import EvidenceError
from harness.evidence.pack import unpack_bundle
from harness.evidence.verify import verify

__all__ = ["why_no_evidence"]

MAX_UNPACKED_BYTES: Final = 512 * 2**20
MAX_HEADER: Final = 4 * 2**20
HEADER_BYTES: Final = 8


def why_no_evidence(path: str, content: bytes | None) -> str | None:
    """What is wrong with a file that should be a bundle or tensors; None where it is one."""
    if content is None:
        return "it has more bytes than can be read"
    if path.endswith(".tar.zst"):
        return _bundle_problem(content)
    if path.endswith(".safetensors"):
        return _tensor_problem(content)
    return "it is neither a packed bundle nor a file of tensors"


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
