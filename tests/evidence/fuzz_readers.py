"""The readers of bundles under Atheris: `python -m tests.evidence.fuzz_readers -max_total_time=60`.

Needs `pip install atheris` (no dependency of ours, as it has no build for every Python). Whatever the bytes
are, a reader answers or raises `EvidenceError`; anything else ends the fuzzer with the input that did it.
"""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris  # type: ignore[import-not-found]  # see above

with atheris.instrument_imports(include=["harness.evidence", "harness.domain"]):
    from harness.domain.bundle import Manifest, SamplesHeader
    from harness.domain.check import Outcome
    from harness.domain.errors import EvidenceError
    from harness.evidence.pack import unpack_bundle
    from harness.evidence.strict_json import parse_record
    from harness.evidence.tables import read_table

SCRATCH = Path(tempfile.mkdtemp(prefix="fuzz-"))


def read_all(content: bytes) -> None:
    """Hand one input to every reader."""
    for kind in (Manifest, Outcome, SamplesHeader):
        with suppress(EvidenceError):
            parse_record(content, kind)
    archive, table, folder = (SCRATCH / name for name in ("a.tar.zst", "t.parquet", "out"))
    archive.write_bytes(content)
    table.write_bytes(content)
    with suppress(EvidenceError):
        read_table(table, "t")
    with suppress(EvidenceError):
        unpack_bundle(archive, folder)
        raise AssertionError("the fuzzer has made a whole bundle; look at it")
    if {p.name for p in SCRATCH.iterdir()} != {"a.tar.zst", "t.parquet"}:
        raise AssertionError("a reader left something behind")


if __name__ == "__main__":
    atheris.Setup(sys.argv, read_all)
    atheris.Fuzz()
