"""What a captured call is written down as: addresses by name, padding as it is, and what cannot be named."""

import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.measure import describe
from harness.measure.describe import Undescribable
from harness.measure.driver import KernelNode, MemsetNode

BASE = 0x7FD0_0000_0000
PLACES: Any = (
    describe._Place("x", BASE, 512, "argument", torch.zeros(1)),
    describe._Place("kept.launches", BASE + 4096, 64, "workspace", torch.zeros(1)),
)


@pytest.fixture(autouse=True)
def known_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows one page from `BASE` on, and a foreign allocation."""
    known = (*range(BASE, BASE + 8192, 8), BASE + 2**20)
    monkeypatch.setattr(describe, "is_device_address", lambda word: word in known)


def test_an_address_becomes_a_buffer_and_an_offset_and_the_rest_stays() -> None:
    value = struct.pack("<QII", BASE + 16, 2, 7168)
    parameter = describe._parameter(value, PLACES)
    (pointer,) = parameter.pointers
    assert (pointer.offset, pointer.buffer, pointer.buffer_offset) == (0, "x", 16)
    assert parameter.constant == "00" * 8 + struct.pack("<II", 2, 7168).hex()


def test_padding_that_looks_like_an_address_is_kept_as_it_is() -> None:
    value = struct.pack("<QIIQ", BASE, 2, 0x7FFC, BASE + 4096)
    parameter = describe._parameter(value, PLACES)
    assert [p.buffer for p in parameter.pointers] == ["x", "kept.launches"]
    assert bytes.fromhex(parameter.constant)[8:16] == struct.pack("<II", 2, 0x7FFC)


def test_memory_that_nothing_names_cannot_be_described() -> None:
    with pytest.raises(Undescribable, match=r"points to 0x7fd000100000, which no argument"):
        describe._parameter(struct.pack("<Q", BASE + 2**20), PLACES)


def test_a_tensor_map_cannot_be_read_back() -> None:
    with pytest.raises(Undescribable, match="a parameter is a tensor map"):
        describe._parameter(struct.pack("<Q", BASE + 2**20) + bytes(120), PLACES)


def test_a_memset_names_its_buffer() -> None:
    found = describe._memory_set(MemsetNode(BASE + 4096, 0, 4, 16), PLACES)
    assert (found.buffer, found.buffer_offset, found.elements) == ("kept.launches", 0, 16)


def kernel(name: str) -> KernelNode:
    return KernelNode(name, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, -1, ((0, struct.pack("<Q", BASE)),), True)


def test_the_binary_is_the_one_file_that_holds_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "a.cubin").write_bytes(b"\x7fELF kernel_a")
    (tmp_path / "b.cubin").write_bytes(b"\x7fELF kernel_b kernel_both")
    (tmp_path / "c.cubin").write_bytes(b"\x7fELF kernel_both")
    launch = describe._kernel(kernel("kernel_a"), PLACES, tmp_path)
    assert (launch.kernel, launch.is_dependent) == ("kernel_a", True)
    for name, count in (("kernel_z", 0), ("kernel_both", 2)):
        with pytest.raises(Undescribable, match=f"{count} compiled files hold the kernel {name}"):
            describe._kernel(kernel(name), PLACES, tmp_path)


class Prepared(NamedTuple):
    """Weights as a candidate laid them out."""

    w13: torch.Tensor
    scales: tuple[torch.Tensor, ...]


def test_tensors_that_a_bound_call_holds_are_found_by_where_they_are() -> None:
    weights = Prepared(torch.ones(2), (torch.ones(3),))
    call = partial(print, weights, launches=torch.zeros(4), scale=1.0)
    names = [name for name, _ in describe._held(call, "kept", 6)]
    assert names == ["kept.launches", "kept.0.w13", "kept.0.scales.0"]
