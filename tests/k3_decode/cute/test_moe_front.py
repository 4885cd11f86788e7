"""The MoE front kernel: three weights streamed as one, in numpy; compilation; values on a GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import moe_front as op
from k3_decode.cute import row_plan, row_sums
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.variant import COMPILED, DISPATCHED

from tests.k3_decode.cute.row_streams import streamed


def run_in_numpy(
    machine_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    shape: tuple[int, int, int],
    tokens: int,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(logits, latent, hidden) by the traced functions and by products of random integers, which are exact.

    `shape`: experts, latent width, hidden width. In place of SiTU stands gate + 64 up: they are told apart.
    """
    experts, width, inter = shape
    rows = experts + width + 2 * inter
    machine = machine_of(op, plan, rows)
    monkeypatch.setattr(op, "ring", SimpleNamespace(situ=lambda gate, up: gate + 64 * up))
    random = np.random.default_rng(3)
    x = random.integers(-4, 5, (tokens, plan.k)).astype(np.float64)
    router = random.integers(-4, 5, (experts, plan.k)).astype(np.float64)
    down = random.integers(-4, 5, (width, plan.k)).astype(np.float64) / 64
    gate, up = random.integers(-4, 5, (2, inter, plan.k)).astype(np.float64) / 64
    turns = np.stack((gate, up), 1).reshape(2 * inter, plan.k)
    x_at, turns_at, down_at, router_at = (machine.place_bf16(values) for values in (x, turns, down, router))
    logits_at = machine.place(
        np.full(tokens * experts, 0x7FC00000, np.uint32), (tokens, experts), (experts, 1)
    )
    latent_at, hidden_at = (
        machine.place(np.full(tokens * size // 2, 0x7FC07FC0, np.uint32), (tokens, size), (size, 1))
        for size in (width, inter)
    )

    place = row_plan.locate(plan)
    segments = [
        (np.int64(at.base), count)
        for at, count in ((router_at, experts), (down_at, width), (turns_at, 2 * inter))
    ]
    sums, _ = streamed(plan, place, segments, x_at, chain=2)
    store = op._store_to(logits_at, latent_at, hidden_at, experts, width)
    row_sums.finish(plan, place, sums, None, row_sums.Extent(tokens, rows), None, store)

    logits = machine.read(logits_at).view(np.float32).reshape(tokens, experts)
    halves = [
        (machine.read(at).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tokens, size)
        for at, size in ((latent_at, width), (hidden_at, inter))
    ]
    truth = (x @ router.T, x @ down.T, x @ gate.T + 64 * (x @ up.T))
    return (logits, *halves), truth


def agrees(found: tuple[np.ndarray, ...], truth: tuple[np.ndarray, ...]) -> bool:
    """Logits exact, the others rounded to bf16."""
    return np.array_equal(found[0], truth[0]) and all(
        np.abs(value - true).max() <= 2.0**-8 * np.abs(true).max()
        for value, true in zip(found[1:], truth[1:], strict=True)
    )


@pytest.mark.parametrize("shape", [(16, 20, 4), (20, 16, 4), (2, 10, 16), (12, 30, 2)])
def test_a_tile_may_hold_rows_of_all_weights(
    shape: tuple[int, int, int], numpy_machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(128, 8, 3, 1, 2, 1, 2)
    assert agrees(*run_in_numpy(numpy_machine, monkeypatch, plan, shape, 5))


def test_a_cluster_of_seven_splits_k_and_shares_the_rows(
    numpy_machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(448, 16, 4, 1, 2, 7, 1)
    assert agrees(*run_in_numpy(numpy_machine, monkeypatch, plan, (12, 28, 8), 16))


def test_a_loop_over_steps_adds_the_same_runs_of_products(
    numpy_machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(1024, 32, 3, 1, 2, 1, 3)
    assert agrees(*run_in_numpy(numpy_machine, monkeypatch, plan, (12, 28, 4), 30))


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("moe_front", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global.v4" not in before
    assert "ld.global.v4" in after


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64])
def test_matches_the_float64_products_on_the_gpu(tokens: int, gpu: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 7168, generator=generator).to(gpu, torch.bfloat16)
    weight = (torch.randn(2096, 7168, generator=generator) / 7168**0.5).to(gpu, torch.bfloat16)
    logits = torch.full((tokens, 112), float("nan"), device=gpu)
    latent = torch.full((tokens, 448), float("nan"), device=gpu, dtype=torch.bfloat16)
    hidden = torch.full((tokens, 768), float("nan"), device=gpu, dtype=torch.bfloat16)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    prepared = op.prepare(
        router_weight=weight[:112], down_weight=weight[112:560], gate_up_weight=weight[560:]
    )
    op.moe_front(x=x, **prepared, logits=logits, latent=latent, hidden=hidden, launches=launches)
    truth = x.double() @ weight.double().T
    gate, up = truth[:, 560:1328], truth[:, 1328:]
    activated = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    assert ((logits - truth[:, :112]).norm() / truth[:, :112].norm()).item() < 2e-6
    assert ((latent - truth[:, 112:560]).norm() / truth[:, 112:560].norm()).item() < 2.0**-8
    assert ((hidden - activated).norm() / activated.norm()).item() < 2.0**-8
    assert launches.tolist() == [0, 0, 0, 1] + [0] * 12
