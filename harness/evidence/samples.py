"""Samples on disk: a JSON header a check, and one Parquet file a table with every raw row.

Invariant: what `read_samples` gives equals what `write_samples` took, value by value and type by type, so
that judging again starts from the same input. Tables are `tables.py`'s, which loads on use: pyarrow takes
0.2 s, and much is asked of a bundle that needs none.
"""

from pathlib import Path

from harness.domain.bundle import SamplesHeader
from harness.domain.check import Samples
from harness.domain.errors import EvidenceError
from harness.domain.record import Digest
from harness.evidence.names import SAMPLES_HEADER, samples_folder, table_file
from harness.evidence.strict_json import load_record

__all__ = ["has_samples", "read_header", "read_samples", "write_samples"]

MAX_HEADER_BYTES = 16 * 2**20


def write_samples(folder: Path, samples: Samples, plan: Digest) -> None:
    """Write the samples of one check into a new folder, bound to the plan with that digest."""
    from harness.evidence.tables import write_table

    folder.mkdir(parents=True)
    for table in samples.tables:
        write_table(folder / f"{table.name}.parquet", table)
    header = SamplesHeader(
        check=samples.check,
        plan=plan,
        tier=samples.tier,
        ended=samples.ended,
        detail=samples.detail,
        duration_s=samples.duration_s,
        findings=samples.findings,
        tables=tuple(t.name for t in samples.tables),
    )
    (folder / SAMPLES_HEADER).write_bytes(header.canonical())


def read_header(root: Path, check: str) -> SamplesHeader:
    """Header of a check's samples; raises `EvidenceError` where it is missing, bad or another check's."""
    path = root / samples_folder(check) / SAMPLES_HEADER
    header = load_record(path, SamplesHeader, MAX_HEADER_BYTES)
    if header.check != check:
        raise EvidenceError(f"{path}: holds the samples of {header.check}, not of {check}")
    return header


def has_samples(root: Path, check: str, plan: Digest) -> bool:
    """Whether a check's samples for this plan are there whole: the header and the footer of every table."""
    from harness.evidence.tables import is_whole

    try:
        header = read_header(root, check)
    except EvidenceError:
        return False
    return header.plan == plan and all(is_whole(root / table_file(check, name)) for name in header.tables)


def read_samples(root: Path, check: str) -> Samples:
    """Samples of one check of the bundle or run at `root`; raises `EvidenceError`."""
    from harness.evidence.tables import read_table

    header = read_header(root, check)
    return Samples(
        check=header.check,
        tier=header.tier,
        ended=header.ended,
        detail=header.detail,
        duration_s=header.duration_s,
        findings=header.findings,
        tables=tuple(read_table(root / table_file(check, name), name) for name in header.tables),
    )
