"""Samples through Parquet and back."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.domain.check import Finding, Samples, SampleTable, Severity
from harness.domain.errors import EvidenceError
from harness.domain.machine import Tier
from harness.domain.record import MAX_WHOLE
from harness.evidence.names import samples_folder
from harness.evidence.samples import has_samples, read_samples, write_samples

CHECK = "kernels/kda_step/cpu"
PLAN = "c" * 64
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
WHOLE = st.integers(-MAX_WHOLE, MAX_WHOLE)
SCALAR = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | TEXT


def _samples(*tables: SampleTable, **fields: Any) -> Samples:
    return Samples(check=CHECK, tier=Tier.SMOKE, tables=tables, **fields)


def _table(rows: tuple[tuple[Any, ...], ...], columns: tuple[str, ...] = ("a", "b")) -> SampleTable:
    return SampleTable(name="errors", columns=columns, rows=rows)


def _types(samples: Samples) -> list[list[type]]:
    return [[type(v) for v in row] for table in samples.tables for row in table.rows]


def test_every_value_comes_back_with_its_type(tmp_path: Path) -> None:
    rows = ((1, 1.0), (2**53 - 1, True), (None, None), (-3, "1"), (0, 0.1))
    samples = _samples(
        _table(rows),
        SampleTable(name="empty", columns=("q",), rows=()),
        SampleTable(name="nothing", columns=("q",), rows=((None,), (None,))),
        detail="last words",
        duration_s=1.25,
        findings=(Finding(rule="zones", severity=Severity.NOTE, message="seen", path="a.py", line=3),),
    )
    write_samples(tmp_path / samples_folder(CHECK), samples, PLAN)
    back = read_samples(tmp_path, CHECK)
    assert back == samples
    assert _types(back) == _types(samples)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(SCALAR, SCALAR), max_size=8))
def test_any_rows_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, Any]]
) -> None:
    root = tmp_path_factory.mktemp("samples")
    samples = _samples(_table(tuple(rows)))
    write_samples(root / samples_folder(CHECK), samples, PLAN)
    back = read_samples(root, CHECK)
    assert back == samples
    assert _types(back) == _types(samples)


def test_columns_of_one_type_are_plain_parquet_for_other_tools(tmp_path: Path) -> None:
    write_samples(tmp_path / samples_folder(CHECK), _samples(_table(((1, "x"), (2, None)))), PLAN)
    schema = pq.read_schema(tmp_path / samples_folder(CHECK) / "errors.parquet")
    assert [str(field.type) for field in schema] == ["int64", "string"]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 64 + b"PAR1", b"not parquet at all"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    write_samples(tmp_path / samples_folder(CHECK), _samples(_table(((1, 2),))), PLAN)
    (tmp_path / samples_folder(CHECK) / "errors.parquet").write_bytes(content)
    with pytest.raises(EvidenceError, match=r"errors\.parquet"):
        read_samples(tmp_path, CHECK)
    assert not has_samples(tmp_path, CHECK, PLAN)


@pytest.mark.parametrize(
    ("column", "word"),
    [
        (pa.array([[1], [2]]), "list"),
        (pa.array([b"x", b"y"]), "binary"),
        (pa.array([1.0, float("nan")]), "finite"),
    ],
)
def test_parquet_with_values_that_samples_never_have_is_refused(
    tmp_path: Path, column: Any, word: str
) -> None:
    write_samples(tmp_path / samples_folder(CHECK), _samples(_table(((1,), (2,)), ("a",))), PLAN)
    pq.write_table(pa.table({"a": column}), tmp_path / samples_folder(CHECK) / "errors.parquet")
    with pytest.raises(EvidenceError, match=word):
        read_samples(tmp_path, CHECK)


def test_a_table_that_unpacks_to_more_cells_than_the_limit_is_refused_unread(tmp_path: Path) -> None:
    write_samples(tmp_path / samples_folder(CHECK), _samples(_table(((1,),), ("a",))), PLAN)
    bomb = pa.table({"a": pa.nulls(20_000_001, pa.bool_())})
    pq.write_table(bomb, tmp_path / samples_folder(CHECK) / "errors.parquet", compression="zstd")
    with pytest.raises(EvidenceError, match="over the limits"):
        read_samples(tmp_path, CHECK)


def test_samples_under_another_checks_name_are_refused(tmp_path: Path) -> None:
    write_samples(tmp_path / samples_folder("kernels/other/cpu"), _samples(_table(((1, 2),))), PLAN)
    with pytest.raises(EvidenceError, match="holds the samples of kernels/kda_step/cpu"):
        read_samples(tmp_path, "kernels/other/cpu")
