"""The AttnRes kernel: the sums' lane map in numpy; compilation; values, exact copies and replays on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import attn_res as op
from k3_decode.cute import reduction
from k3_decode.cute.variant import COMPILED, DISPATCHED


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
def test_lane_sums_leave_each_total_in_the_lane_that_is_named(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = np.arange(32)
    values = np.random.default_rng(1).integers(-50, 50, (count, 32)).astype(np.float64)
    monkeypatch.setattr(reduction, "choose", lambda bit, set_, zero: np.where(bit != 0, set_, zero))
    monkeypatch.setattr(reduction.cute.arch, "shuffle_sync_bfly", lambda v, offset: v[lane ^ offset])
    totals = reduction.lane_sums(list(values), lane)
    assert totals.tolist() == values.sum(axis=1)[reduction.lane_slot(lane, count)].tolist()


@pytest.mark.parametrize(("blocks", "slots"), [(0, 2), (1, 4), (3, 8), (4, 16), (7, 16), (8, 32), (15, 32)])
def test_a_warp_publishes_one_square_and_one_product_a_source(blocks: int, slots: int) -> None:
    assert op.slots_of(blocks) == slots


def test_small_widths_use_one_block_and_k3_spreads_a_row_over_seven() -> None:
    assert op.cluster_of(192, 1) == 1
    assert op.cluster_of(128, 64) == 1
    assert op.cluster_of(7168, 1) == 7


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("attn_res", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global.v4.b32" not in before
    assert after.count("ld.global.v4.b32") == 6
    assert "ld.weak.global" not in after


def arguments(tokens: int, hidden: int, gpu: Any, seed: int) -> dict[str, Any]:
    """Random arguments with gaps between rows."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(gpu, torch.bfloat16)

    return {
        "prefix": rows(tokens, hidden + 64)[:, :hidden],
        "delta": rows(tokens, hidden + 8)[:, :hidden],
        "blocks": rows(tokens, 8, hidden),
        "score_weight": torch.randn(hidden, generator=generator).to(gpu) * hidden**-0.5,
        "norm_weight": rows(hidden) * 0.2 + 1,
        "out": torch.full((tokens, hidden), float("nan"), device=gpu, dtype=torch.bfloat16),
        "eps": 1e-5,
    }


def truth_of(args: dict[str, Any], blocks_read: int) -> Any:
    """The float64 value."""
    import torch

    new = (args["prefix"].double() + args["delta"].double()).to(torch.bfloat16).double()
    sources = torch.cat((args["blocks"][:, :blocks_read].double(), new[:, None]), 1)
    root = torch.sqrt((sources**2).mean(-1) + 1e-5)
    alpha = torch.softmax((sources @ args["score_weight"].double()) / root, 1)
    mix = (alpha[..., None] * sources).sum(1)
    return mix / torch.sqrt((mix**2).mean(1, keepdim=True) + 1e-5) * args["norm_weight"].double()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 17, 33, 64])
@pytest.mark.parametrize(("hidden", "blocks_read"), [(7168, 0), (7168, 4), (7168, 7), (192, 3), (128, 1)])
def test_matches_the_float64_value_and_copies_exactly(
    hidden: int, blocks_read: int, tokens: int, gpu: Any
) -> None:
    import torch

    args = arguments(tokens, hidden, gpu, 3)
    truth, blocks = truth_of(args, blocks_read), args["blocks"].clone()
    new = (args["prefix"].float() + args["delta"].float()).to(torch.bfloat16)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    op.attn_res(**args, blocks_read=blocks_read, write_index=blocks_read, launches=launches)
    blocks[:, blocks_read] = new
    assert torch.equal(args["prefix"], new)
    assert torch.equal(args["blocks"], blocks)
    assert ((args["out"].double() - truth).norm(dim=1) / truth.norm(dim=1)).max().item() < 2.0**-8
    assert launches.tolist() == [1] + [0] * 15


@pytest.mark.gpu
def test_replays_follow_changed_inputs(gpu: Any) -> None:
    import torch

    args, launches = arguments(4, 7168, gpu, 5), torch.zeros(16, dtype=torch.int32, device=gpu)
    op.attn_res(**args, blocks_read=4, write_index=-1, launches=launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.attn_res(**args, blocks_read=4, write_index=-1, launches=launches)
    for seed in range(6, 9):
        fresh = arguments(4, 7168, gpu, seed)
        for name in ("prefix", "delta", "blocks", "score_weight", "norm_weight"):
            args[name].copy_(fresh[name])
        truth = truth_of(args, 4)
        graph.replay()
        assert ((args["out"].double() - truth).norm() / truth.norm()).item() < 2.0**-8
    assert launches[0].item() == 4
