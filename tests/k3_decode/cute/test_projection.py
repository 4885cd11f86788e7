"""The projection kernel: operand map, reduction and edges in numpy; compilation; values on a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.compile import find_disassembler
from k3_decode.cute import projection as op
from k3_decode.cute import row_gemm, row_plan, row_sums
from k3_decode.cute.plans import FEW, plan_for, plans_by_architecture
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.variant import COMPILED, DISPATCHED

from tests.k3_decode.cute.row_streams import streamed

PLANS = {
    "one_block": (48, Plan(256, 8, 3, 1, 4, 1, 2, is_whole=True)),
    "uneven_k": (48, Plan(224, 8, 2, 1, 3, 1, 3, 2)),
    "rows_past_the_end": (40, Plan(128, 16, 2, 1, 2, 1, 1)),
    "two_row_warps": (64, Plan(128, 32, 2, 2, 2, 1, 2)),
    "cluster_of_two": (48, Plan(512, 16, 3, 1, 4, 2, 2)),
    "cluster_of_seven": (32, Plan(448, 8, 2, 1, 2, 7, 1)),
    "uneven_cluster": (24, Plan(352, 64, 1, 1, 2, 3, 2)),
    "loop": (64, Plan(1024, 32, 2, 2, 2, 1, 3)),
    "uneven_loop": (40, Plan(1120, 64, 3, 1, 3, 1, 2)),
    "warpgroup": (64, Plan(256, 32, 2, 4, 1, 1, 3, is_grouped=True)),
    "two_warpgroups": (120, Plan(256, 64, 2, 8, 1, 1, 2, is_grouped=True)),
    "warpgroups_in_a_cluster": (128, Plan(512, 64, 2, 4, 1, 4, 2, is_grouped=True)),
}


def halves(words: np.ndarray) -> np.ndarray:
    """The bf16 values of 4-byte words, as float64."""
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run_in_numpy(
    machine_of: Callable[..., Any], shape: tuple[int, Plan], tokens: int, is_fp32: bool
) -> tuple[np.ndarray, ...]:
    """What the traced functions compute for random operands, and the float64 product of the same operands."""
    rows, plan = shape
    machine = machine_of(op, plan, rows)
    random = np.random.default_rng(7)
    x, weight = random.standard_normal((tokens, plan.k)), random.standard_normal((rows, plan.k))
    x_at, weight_at = machine.place_bf16(x), machine.place_bf16(weight)
    size = tokens * rows // (1 if is_fp32 else 2)
    out_at = machine.place(np.full(size, 0x7FC07FC0, np.uint32), (tokens, rows), (rows, 1))

    place, extent = row_plan.locate(plan), row_sums.Extent(tokens, rows)
    segments, store = [(op.ins.byte_address(weight_at), rows)], op._store_to(out_at, is_fp32)
    if plan.is_grouped:
        tiles = row_gemm.Tiles(plan, place, segments, x_at)
        sums = [np.float32(0.0)] * (plan.tokens // 2)
        row_gemm.start(plan, tiles)
        earlier = list(sums)
        for stage in range(int(tiles.count.max())):
            row_gemm.advance(plan, tiles, stage, sums, None, None, is_chained=not is_fp32)
            row_gemm.carry(plan, sums, earlier)
        row_gemm.carry(plan, sums, earlier)
        sums = earlier
        row_gemm.publish(plan, place, tiles, sums, None)
        row_sums.finish_published(plan, place, False, extent, None, store)
    else:
        sums, _ = streamed(plan, place, segments, x_at)
        row_sums.finish(plan, place, sums, None, extent, None, store)

    words = machine.read(out_at)
    values = words.view(np.float32) if is_fp32 else halves(words)
    truth = (
        halves(machine.read(x_at)).reshape(x.shape) @ halves(machine.read(weight_at)).reshape(weight.shape).T
    )
    own = row_sums.own_pairs(plan, place)
    first = np.unique(machine.bid, return_index=True)[1]
    expected = tokens * np.broadcast_to(own, machine.bid.shape)[first] * 8 * plan.cluster
    return values.reshape(truth.shape), truth, machine.received, expected


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_computes_the_whole_product(name: str, numpy_machine: Callable[..., Any]) -> None:
    plan = PLANS[name][1]
    values, truth, received, expected = run_in_numpy(
        numpy_machine, PLANS[name], plan.tokens - 3, is_fp32=True
    )
    assert np.abs(values - truth).max() < 1e-4
    if plan.cluster > 1:
        assert received.tolist() == expected.tolist()


def test_wide_plans_without_warpgroups_loop_over_their_steps_and_others_do_not() -> None:
    assert [name for name, (_, plan) in PLANS.items() if plan.is_rolled] == [
        "two_row_warps",
        "loop",
        "uneven_loop",
    ]
    measured = [p for p, where in plans_by_architecture(tuple(FEW)) if "sm_90a" in where]
    assert measured
    assert not any(plan.is_rolled for plan in measured)


def test_bf16_output_is_the_sum_rounded_once(numpy_machine: Callable[..., Any]) -> None:
    values, truth, _, _ = run_in_numpy(numpy_machine, PLANS["one_block"], 1, is_fp32=False)
    assert np.abs(values - truth).max() <= 2.0**-8 * np.abs(truth).max()


def test_tokens_past_the_last_are_never_stored(numpy_machine: Callable[..., Any]) -> None:
    values, truth, _, _ = run_in_numpy(numpy_machine, PLANS["cluster_of_two"], 1, is_fp32=True)
    assert values.shape == (1, 48)
    assert np.isfinite(values).all()
    assert np.abs(values - truth).max() < 1e-4


@pytest.mark.parametrize("rows", [48, 56, 64, 96, 128])
def test_partial_sums_of_eight_tokens_hit_every_bank_once(rows: int) -> None:
    plan = Plan(256, 8, rows // 8, 1, 4, 1, 1)
    half_warp = [(group * plan.pitch + 2 * quad) % 32 for group in range(4) for quad in range(4)]
    assert sorted(half_warp) == list(range(0, 32, 2))


def test_shared_memory_of_every_variant_leaves_room_for_the_next_kernel() -> None:
    plans = [plan_for(m, k, b, True) for m, k in ((6288, 7168), (7168, 1536)) for b in (1, 16)]
    assert max(row_plan.shared_layout(plan).size for plan in plans) <= 110 * 1024


def test_every_plan_that_a_step_may_get_is_among_the_variants() -> None:
    known = dict(plans_by_architecture(tuple(FEW)))
    for is_grouped, architectures in ((True, DISPATCHED), (False, COMPILED)):
        plans = {plan_for(*shape, tokens, is_grouped) for shape in FEW for tokens in range(1, 65)}
        assert all(set(architectures) <= set(known[plan]) for plan in plans)


def test_one_token_and_two_have_tilings_of_their_own_where_a_layer_gains() -> None:
    assert [plan_for(896, 3584, tokens, True).k_warps for tokens in (1, 2)] == [4, 8]
    assert [plan_for(6288, 7168, tokens, True).row_tiles for tokens in (1, 2, 3)] == [3, 2, 3]


def test_a_k_that_is_no_multiple_of_32_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        Plan(100, 8, 1, 1, 1, 1, 1)


def test_three_warpgroups_are_refused_where_their_copies_would_leave_tokens_out() -> None:
    with pytest.raises(ValueError, match="48 lines"):
        Plan(256, 64, 2, 12, 1, 1, 2, is_grouped=True)


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("projection", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.weak.global" in before
    assert "ld.global.v4" not in before
    assert "ld.global.v4" in after


def test_weights_are_asked_for_before_the_wait_in_the_machine_code_too(tmp_path: Path) -> None:
    if find_disassembler() is None:
        pytest.skip("no nvdisasm (nvidia-cuda-nvdisasm)")
    plan = plan_for(7168, 1536, 1, is_grouped=True)
    name = f"projection_{plan.name}"
    command = [sys.executable, "-m", "k3_decode.compile", "--arch", "sm_90a", "--out", str(tmp_path), name]
    env = {**os.environ, "PYTHONPATH": str(Path(op.__file__).parents[2])}
    subprocess.run(command, check=True, capture_output=True, env=env)
    before, after = (tmp_path / "sm_90a" / f"{name}.sass").read_text().split("ACQBULK", 1)
    assert before.count("LDG.E") == 20  # a depth of 10 steps, two tiles each
    assert after.count("LDG.E") == 4 + 12  # the last 2 steps, and an activation for each of the 12


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 17, 64])
def test_matches_the_float64_product_on_the_gpu(tokens: int, gpu: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(11)
    x = torch.randn(tokens, 7168, generator=generator).to(gpu, torch.bfloat16)
    weight = (torch.randn(6288, 7168, generator=generator) / 7168**0.5).to(gpu, torch.bfloat16)
    out = torch.full((tokens, 6288), float("nan"), device=gpu, dtype=torch.bfloat16)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    op.projection(x=x, weight=weight, out=out, launches=launches)
    truth = x.double() @ weight.double().T
    error = (out.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max().item() < 2.0**-8
    assert launches.tolist() == [0, 1] + [0] * 14


@pytest.mark.gpu
def test_one_compilation_serves_every_token_count_of_a_capacity(gpu: Any) -> None:
    import torch

    weight = torch.randn(64, 256, device=gpu, dtype=torch.bfloat16)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    op.compile_plan.cache_clear()
    for tokens in range(1, 9):
        x = torch.randn(tokens, 256, device=gpu, dtype=torch.bfloat16)
        out = torch.empty(tokens, 64, device=gpu, dtype=torch.bfloat16)
        op.projection(x=x, weight=weight, out=out, launches=launches)
    assert op.compile_plan.cache_info().misses == 1
