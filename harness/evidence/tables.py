"""One sample table as a Parquet file, exact both ways.

Columns of one type are plain Parquet columns, for other tools to read; a column that mixes types holds JSON
text and is named in the file's metadata. Loads pyarrow, so that whoever reads no table imports `samples`
alone.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from harness.domain.check import SampleTable
from harness.domain.errors import EvidenceError
from harness.domain.record import Scalar
from harness.evidence.strict_json import open_regular, parse_json

__all__ = ["is_whole", "read_table", "write_table"]

MAX_CELLS = 20_000_000
MAX_COLUMNS = 512
MAX_TABLE_BYTES = 2**30
"""Uncompressed; larger than any table of a full run, small enough to hold."""
_MIXED = b"fasttrack.mixed"
_INT64 = range(-(2**63), 2**63)
_FLOAT = pa.float64()
_TYPES = frozenset({pa.null(), pa.bool_(), pa.int64(), _FLOAT, pa.string()})


def write_table(path: Path, table: SampleTable) -> None:
    """Write one table into a new file."""
    arrays, fields = [], []
    for place, name in enumerate(table.columns):
        field, array = _encode(name, [row[place] for row in table.rows])
        fields.append(field)
        arrays.append(array)
    content = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    with pq.ParquetWriter(path, content.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(content)
        if mixed := [f.name for f in fields if f.metadata]:
            writer.add_key_value_metadata({_MIXED.decode(): json.dumps(mixed)})


def is_whole(path: Path) -> bool:
    """Whether a table's footer can be read, which is written last."""
    try:
        with os.fdopen(open_regular(path), "rb") as raw:
            pq.ParquetFile(raw)
    except (EvidenceError, pa.ArrowException, OSError, ValueError):
        return False
    return True


def read_table(path: Path, name: str) -> SampleTable:
    """One table; raises `EvidenceError` for a file that is no Parquet of ours or is over the limits."""
    try:
        with os.fdopen(open_regular(path), "rb") as raw:
            file = pq.ParquetFile(
                raw, thrift_string_size_limit=2**26, thrift_container_size_limit=2**20, pre_buffer=False
            )
            _require_bounded(file.metadata)
            content = file.read(use_threads=False)  # small tables: threads cost more than they give
        columns = tuple(content.schema.names)
        if len(set(columns)) != len(columns):
            raise EvidenceError("names a column twice")
        mixed = _mixed_columns(file.metadata.metadata or {})
        values = [_decode(f, content.column(i), f.name in mixed) for i, f in enumerate(content.schema)]
        return SampleTable(name=name, columns=columns, rows=tuple(zip(*values, strict=True)))
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}") from error
    except (pa.ArrowException, OSError, ValueError, ValidationError, MemoryError) as error:
        raise EvidenceError(f"{path}: is no readable sample table: {str(error)[:200]}") from None


def _encode(name: str, values: Sequence[Scalar]) -> tuple[pa.Field, pa.Array]:
    kinds = {type(v) for v in values if v is not None}
    if not kinds:
        kind = pa.null()
    elif kinds == {bool}:
        kind = pa.bool_()
    elif kinds == {float}:
        kind = pa.float64()
    elif kinds == {str}:
        kind = pa.string()
    elif kinds == {int} and all(v is None or v in _INT64 for v in values):
        kind = pa.int64()
    else:
        text = [None if v is None else json.dumps(v) for v in values]
        return pa.field(name, pa.string(), metadata={_MIXED: b""}), pa.array(text, pa.string())
    return pa.field(name, kind), pa.array(values, kind)


def _decode(field: pa.Field, column: pa.ChunkedArray, is_mixed: bool) -> list[Scalar]:
    if field.type not in _TYPES:
        # A column of nothing has no Parquet type of its own and comes back as int32 without values.
        if column.null_count == len(column):
            return [None] * len(column)
        raise EvidenceError(f"column {field.name!r} has type {field.type}, which samples never have")
    values: list[Any] = column.to_pylist()
    if field.type == _FLOAT and not all(math.isfinite(v) for v in values if v is not None):
        raise EvidenceError(f"column {field.name!r} holds a number that is not finite")
    return [None if v is None else _parse_scalar(str(v)) for v in values] if is_mixed else values


def _mixed_columns(metadata: Mapping[bytes, bytes]) -> frozenset[str]:
    if _MIXED not in metadata:
        return frozenset()
    names = parse_json(metadata[_MIXED])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise EvidenceError("names its mixed columns wrongly")
    return frozenset(names)


def _parse_scalar(text: str) -> Scalar:
    value = parse_json(text.encode())
    if value is not None and not isinstance(value, bool | int | float | str):
        raise EvidenceError("holds something that is no scalar")
    return value


def _require_bounded(metadata: pq.FileMetaData) -> None:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    cells = metadata.num_rows * metadata.num_columns
    if metadata.num_columns > MAX_COLUMNS or cells > MAX_CELLS or size > MAX_TABLE_BYTES or cells < 0:
        raise EvidenceError(
            f"has {metadata.num_rows} rows of {metadata.num_columns} columns ({size} bytes), over the limits "
            f"({MAX_CELLS} cells, {MAX_COLUMNS} columns, {MAX_TABLE_BYTES} bytes)"
        )
