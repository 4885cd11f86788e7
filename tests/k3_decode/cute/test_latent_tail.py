"""The latent tail kernel: norm after the product and shared add, in numpy; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import latent_tail as op
from k3_decode.cute import row_gemm, row_plan, row_sums
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.variant import COMPILED, DISPATCHED

from tests.k3_decode.cute.row_streams import streamed

PLANS = {
    "one_block": (48, Plan(256, 8, 3, 1, 4, 1, 2, is_whole=True)),
    "uneven_k": (48, Plan(224, 16, 2, 1, 3, 1, 3, 2)),
    "two_row_warps": (64, Plan(128, 8, 2, 2, 2, 1, 2)),
    "cluster_of_four": (40, Plan(512, 32, 2, 1, 2, 4, 2)),
    "loop": (48, Plan(1024, 32, 2, 1, 2, 1, 3)),
    "warpgroup": (64, Plan(256, 16, 2, 4, 1, 1, 3, is_grouped=True)),
    "warpgroups_in_a_cluster": (120, Plan(512, 64, 2, 8, 1, 2, 2, is_grouped=True)),
    "uneven_cluster": (24, Plan(352, 8, 1, 1, 2, 3, 2)),
}


def halves(words: np.ndarray) -> np.ndarray:
    """The bf16 values of 4-byte words, as float64."""
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_norms_projects_and_adds(name: str, numpy_machine: Callable[..., Any]) -> None:
    (rows, plan), tokens, eps = PLANS[name], 5, 1e-5
    machine = numpy_machine(op, plan, rows)
    random = np.random.default_rng(9)
    shapes = ((tokens, plan.k), (plan.k,), (rows, plan.k), (tokens, rows))
    latent_at, norm_at, up_at, shared_at = (machine.place_bf16(random.standard_normal(s)) for s in shapes)
    empty = np.full(tokens * rows // 2, 0x7FC07FC0, np.uint32)
    out_at = machine.place(empty, (tokens, rows), (rows, 1))

    place, extent = row_plan.locate(plan), row_sums.Extent(tokens, rows)
    segments = [(op.ins.byte_address(up_at), rows)]
    store = op._store_to(shared_at, out_at)
    if plan.is_grouped:
        tiles = row_gemm.Tiles(plan, place, segments, latent_at)
        sums, squares = [np.float32(0.0)] * (plan.tokens // 2), [np.float32(0.0)] * len(tiles.tokens)
        row_gemm.start(plan, tiles)
        for stage in range(int(tiles.count.max())):
            row_gemm.advance(plan, tiles, stage, sums, squares, norm_at)
        row_gemm.publish(plan, place, tiles, sums, squares)
        row_sums.finish_published(plan, place, True, extent, eps, store)
    else:
        sums, squares = streamed(plan, place, segments, latent_at, norm_at)
        row_sums.finish(plan, place, sums, squares, extent, eps, store)

    tensors = (latent_at, norm_at, up_at, shared_at)
    latent, norm, up, shared = (
        halves(machine.read(t))[: np.prod(s)].reshape(s) for t, s in zip(tensors, shapes, strict=True)
    )
    root = np.sqrt((latent**2).mean(axis=1, keepdims=True) + eps)
    truth = shared + latent / root * norm @ up.T
    error = np.abs(halves(machine.read(out_at)).reshape(truth.shape) - truth)
    assert error.max() <= 2.0**-8 * np.abs(truth).max() + 2.0**-9 * np.sqrt(plan.k) * 4


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("latent_tail", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global.v4" not in before
    assert "ld.global.v4" in after


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64])
@pytest.mark.parametrize("rows", [896, 7168])
def test_matches_the_float64_value_on_the_gpu(rows: int, tokens: int, gpu: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(5)
    bf16 = torch.bfloat16
    latent = torch.randn(tokens, 3584, generator=generator).to(gpu, bf16)
    norm = (torch.rand(3584, generator=generator) + 0.5).to(gpu, bf16)
    up = (torch.randn(rows, 3584, generator=generator) / 3584**0.5).to(gpu, bf16)
    shared = torch.randn(tokens, rows, generator=generator).to(gpu, bf16)
    out = torch.full((tokens, rows), float("nan"), device=gpu, dtype=bf16)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    op.latent_tail(
        latent=latent, norm_weight=norm, up_weight=up, shared=shared, out=out, eps=1e-5, launches=launches
    )
    wide = latent.double()
    root = torch.sqrt((wide * wide).mean(1, keepdim=True) + 1e-5)
    truth = shared.double() + (wide / root * norm.double()) @ up.double().T
    error = (out.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max().item() < 2.0**-8
    assert launches.tolist() == [0] * 7 + [1] + [0] * 8
