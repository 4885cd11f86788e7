"""The MoE front kernel: two weights streamed as one, in numpy; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import moe_front as op
from k3_decode.cute import row_plan, row_stream, row_sums
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.variant import COMPILED, DISPATCHED


def run_in_numpy(
    machine_of: Callable[..., Any], rows: int, plan: Plan, experts: int, tokens: int
) -> tuple[np.ndarray, ...]:
    """Logits and latent by the traced functions, and both products of random integers, which are exact."""
    machine = machine_of(op, plan, rows)
    random = np.random.default_rng(3)
    x = random.integers(-4, 5, (tokens, plan.k)).astype(np.float64)
    router = random.integers(-4, 5, (experts, plan.k)).astype(np.float64)
    down = random.integers(-4, 5, (rows - experts, plan.k)).astype(np.float64) / 64
    x_at, down_at, router_at = (machine.place_bf16(values) for values in (x, down, router))
    width = rows - experts
    logits_at = machine.place(
        np.full(tokens * experts, 0x7FC00000, np.uint32), (tokens, experts), (experts, 1)
    )
    latent_at = machine.place(
        np.full(tokens * width // 2, 0x7FC07FC0, np.uint32), (tokens, width), (width, 1)
    )

    place = row_plan.locate(plan)
    segments = [(op.ins.byte_address(router_at), experts), (op.ins.byte_address(down_at), width)]
    sums, _ = row_stream.stream(plan, place, segments, x_at, chain=2)
    store = op._store_to(logits_at, latent_at, experts)
    row_sums.finish(plan, place, sums, None, row_sums.Extent(tokens, rows), None, store)

    logits = machine.read(logits_at).view(np.float32).reshape(tokens, experts)
    bits = machine.read(latent_at).view(np.uint16).astype(np.uint32) << 16
    return logits, bits.view(np.float32).reshape(tokens, width), x @ router.T, x @ down.T


@pytest.mark.parametrize("experts", [16, 20, 2])
def test_a_tile_may_hold_rows_of_both_weights(experts: int, numpy_machine: Callable[..., Any]) -> None:
    plan = Plan(128, 8, 3, 1, 2, 1, 2)
    logits, latent, true_logits, true_latent = run_in_numpy(numpy_machine, 44, plan, experts, 5)
    assert np.array_equal(logits, true_logits)
    assert np.abs(latent - true_latent).max() <= 2.0**-8 * np.abs(true_latent).max()


def test_a_cluster_of_seven_splits_k_and_shares_the_rows(numpy_machine: Callable[..., Any]) -> None:
    plan = Plan(448, 16, 4, 1, 2, 7, 1)
    logits, latent, true_logits, true_latent = run_in_numpy(numpy_machine, 56, plan, 12, 16)
    assert np.array_equal(logits, true_logits)
    assert np.abs(latent - true_latent).max() <= 2.0**-8 * np.abs(true_latent).max()


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("moe_front", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global.v4" not in before
    assert "st.async" in after


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64])
def test_matches_the_float64_products_on_the_gpu(tokens: int, gpu: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 7168, generator=generator).to(gpu, torch.bfloat16)
    weight = (torch.randn(560, 7168, generator=generator) / 7168**0.5).to(gpu, torch.bfloat16)
    logits = torch.full((tokens, 112), float("nan"), device=gpu)
    latent = torch.full((tokens, 448), float("nan"), device=gpu, dtype=torch.bfloat16)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    op.moe_front(
        x=x,
        router_weight=weight[:112],
        down_weight=weight[112:],
        logits=logits,
        latent=latent,
        launches=launches,
    )
    truth = x.double() @ weight.double().T
    assert ((logits - truth[:, :112]).norm() / truth[:, :112].norm()).item() < 2e-6
    assert ((latent - truth[:, 112:]).norm() / truth[:, 112:].norm()).item() < 2.0**-8
    assert launches.tolist() == [0, 0, 0, 1] + [0] * 12
