"""Launch records: what a record may say, and what the trusted process refuses before it launches anything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from harness.domain.errors import EvidenceError
from harness.domain.launch_record import KernelLaunch, LaunchParameter, LaunchRecord, Pointer, TensorMap
from harness.measure.described import check_record
from harness.measure.tensor_files import load_arguments, save_arguments
from tests.measure.launchable import added_record, tile_record, write_binary


def changed(record: LaunchRecord, **changes: Any) -> LaunchRecord:
    (step,) = record.steps
    assert isinstance(step, KernelLaunch)
    return record.model_copy(update={"steps": (step.model_copy(update=changes),)})


@pytest.fixture
def binaries(tmp_path: Path) -> dict[str, Path]:
    return write_binary(tmp_path)


def test_an_honest_record_has_nothing_against_it(binaries: dict[str, Path]) -> None:
    (digest,) = binaries
    assert check_record(added_record(digest, 4, 32), binaries) == ()
    assert check_record(tile_record(digest), binaries) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": "another"}, "small.cubin holds no kernel another"),
        ({"cubin": "0" * 64}, "no file has the digest 000000000000 of the kernel add_weight"),
        ({"block": (1025, 1, 1)}, "asks for blocks of (1025, 1, 1) threads"),
        ({"cluster": (4, 4, 2), "grid": (4, 4, 2)}, "in clusters of (4, 4, 2)"),
        ({"shared_bytes": 300_000}, "asks for 300000 bytes of shared memory"),
        ({"cluster": (3, 1, 1)}, "has a grid of (4, 1, 1) that clusters of (3, 1, 1) do not divide"),
    ],
)
def test_a_record_that_asks_for_anything_else_is_refused(
    changes: dict[str, Any], words: str, binaries: dict[str, Path]
) -> None:
    (digest,) = binaries
    (wrong,) = check_record(changed(added_record(digest, 4, 32), **changes), binaries)
    assert words in wrong


def test_a_binary_that_was_changed_after_its_description_is_refused(binaries: dict[str, Path]) -> None:
    ((digest, path),) = binaries.items()
    path.write_text(path.read_text().replace("add.f32", "sub.f32"))
    (wrong,) = check_record(added_record(digest, 4, 32), binaries)
    assert "is not the file of digest" in wrong


def test_an_address_outside_of_every_named_buffer_cannot_be_written_down() -> None:
    record = added_record("0" * 64, 4, 32)
    far = LaunchParameter(
        constant="00" * 8, pointers=(Pointer(offset=0, buffer="x", buffer_offset=4 * 4 * 32),)
    )
    with pytest.raises(ValidationError, match="512 bytes into x lies in no buffer"):
        LaunchRecord.model_validate(changed(record, parameters=(far,)).model_dump())
    nowhere = LaunchParameter(constant="00" * 8, pointers=(Pointer(offset=0, buffer="y", buffer_offset=0),))
    with pytest.raises(ValidationError, match="0 bytes into y lies in no buffer"):
        LaunchRecord.model_validate(changed(record, parameters=(nowhere,)).model_dump())


def test_a_pointer_lies_inside_its_parameter_and_a_tensor_map_fills_one_alone() -> None:
    with pytest.raises(ValidationError, match="a pointer lies outside of its parameter of 8 bytes"):
        LaunchParameter(constant="00" * 8, pointers=(Pointer(offset=8, buffer="x", buffer_offset=0),))
    wanted = TensorMap(
        buffer="x", buffer_offset=0, dtype=7, dims=(16,), strides=(), box=(8,), element_strides=(1,)
    )
    with pytest.raises(ValidationError, match="a tensor map fills a parameter of 128 bytes alone, not 64"):
        LaunchParameter(constant="00" * 64, tensor_map=wanted)


def test_arguments_come_back_from_files_bit_for_bit_at_their_strides(tmp_path: Path) -> None:
    wide = torch.arange(24, dtype=torch.float32).view(4, 6).to(torch.bfloat16)
    args = {"x": wide[:, :4], "ids": torch.tensor([3, -1]), "eps": 1e-5, "delta": None, "rows": 2}
    save_arguments(args, tmp_path)
    found = load_arguments(tmp_path, "cpu")
    assert torch.equal(found["x"], args["x"])  # type: ignore[arg-type]  # a tensor
    assert found["x"].stride() == (6, 1)
    assert found["ids"].tolist() == [3, -1]
    assert {name: found[name] for name in ("eps", "delta", "rows")} == {"eps": 1e-5, "delta": None, "rows": 2}


def test_a_file_that_does_not_fit_its_manifest_is_no_argument(tmp_path: Path) -> None:
    save_arguments({"x": torch.zeros(4)}, tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\0" * 12)
    with pytest.raises(EvidenceError, match="x has 12 bytes and does not fit its manifest"):
        load_arguments(tmp_path, "cpu")
