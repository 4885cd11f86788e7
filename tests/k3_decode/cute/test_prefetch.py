"""The weight prefetch: its pieces, its refusals, compilation."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import prefetch as op
from k3_decode.cute.variant import DISPATCHED


@pytest.mark.parametrize(
    ("size", "pieces", "blocks"), [(16, 1, 1), (4096, 1, 1), (4112, 2, 1), (131072, 32, 1), (131088, 33, 2)]
)
def test_the_last_piece_may_be_short(size: int, pieces: int, blocks: int) -> None:
    assert op.pieces_of(size) == (pieces, blocks)


@pytest.mark.parametrize(("first", "wanted"), [(8, 16), (0, 24), (0, 0), (2032, 32)])
def test_a_range_that_is_not_inside_or_not_aligned_is_refused(first: int, wanted: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.zeros(1024, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="16-byte range"):
        op.prefetch(weight=weight, launches=torch.zeros(16), first_byte=first, bytes_wanted=wanted)


@pytest.mark.parametrize("architecture", DISPATCHED)
def test_compiles_to_bulk_prefetches_and_reads_nothing(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("prefetch", architecture).values()
    assert "cp.async.bulk.prefetch.L2.global" in ptx
    assert "ld.global" not in ptx


@pytest.mark.gpu
def test_counts_its_launch_and_changes_nothing(gpu: Any) -> None:
    import torch

    weight = torch.arange(5000, device=gpu, dtype=torch.int32).to(torch.bfloat16)[:4992]
    before, launches = weight.clone(), torch.zeros(16, dtype=torch.int32, device=gpu)
    op.prefetch(weight=weight, launches=launches)
    assert torch.equal(weight, before)
    assert launches.tolist() == [0] * 15 + [1]
