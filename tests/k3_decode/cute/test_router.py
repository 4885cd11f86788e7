"""The router kernel: its selection rule replayed on hostile rows; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import router as op
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import Cell
from k3_decode.ops.router import REGIMES, SPEC
from k3_decode.shapes import CANARY, K3, NANO

from tests.k3_decode.op_errors import outputs, tensor

LOWEST = -(2**31)


def selected(logits: np.ndarray, bias: np.ndarray, top_k: int) -> tuple[list[int], int]:
    """Ids by the kernel's rule (limit from lane maxima, then counting), and how many keys competed."""
    with np.errstate(over="ignore"):
        score = np.float32(1) / (np.float32(1) + np.exp(-logits.astype(np.float32)))
    sums = np.where(np.isnan(logits), np.float32(0), score) + bias
    bits = sums.astype(np.float32).view(np.int32)
    keys = np.where(np.isnan(logits) | np.isnan(bias), op.MINUS_INFINITY, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    warps = op.warps_of(len(keys))
    lanes = np.full(warps * 128, LOWEST, np.int64)
    lanes[: len(keys)] = keys
    limit = LOWEST
    if warps > 1:
        best = np.sort(lanes.reshape(warps, 32, op.VECTOR).max(2), axis=1)[:, ::-1]
        limit = int(best[:, op.rounds_of(len(keys), top_k) - 1].min())
    rivals = [e for e in range(len(keys)) if keys[e] >= limit]
    rank = {e: sum(keys[o] > keys[e] or (keys[o] == keys[e] and o < e) for o in rivals) for e in rivals}
    return sorted((e for e in rivals if rank[e] < top_k), key=rank.__getitem__), len(rivals)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("model", [K3, CANARY, NANO], ids=lambda m: m.name)
def test_the_selection_rule_gives_the_oracles_ids(model: Any, regime: str) -> None:
    cell = Cell(model.rank(1), 4)
    args = SPEC.make_args(cell, regime, torch.Generator().manual_seed(6), torch.device("cpu"))
    truth = SPEC.oracle(args)["ids"]
    for row in range(4):
        ids, _ = selected(tensor(args["logits"])[row].numpy(), tensor(args["bias"]).numpy(), model.top_k)
        assert ids == truth[row].tolist()


def test_few_keys_compete_in_a_usual_row() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(50, 896, generator=generator).numpy()
    counts = [selected(row, np.zeros(896, np.float32), 16)[1] for row in rows]
    assert min(counts) >= 16
    assert np.mean(counts) < 64


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("router", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.weak.global.v4.f32" in before  # the bias, a weight
    assert "ld.global.v4.f32" not in before
    assert "ld.global.v4.f32" in after
    assert "ld.weak.global" not in after


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("regime", REGIMES)
def test_ids_are_the_oracles_and_weights_within_stocks_error_on_the_gpu(
    regime: str, tokens: int, gpu: Any
) -> None:
    args = SPEC.make_args(Cell(K3.rank(8), tokens), regime, torch.Generator().manual_seed(2), gpu)
    truth = SPEC.oracle(args)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    op.router(**args, launches=launches)  # type: ignore[arg-type]
    assert torch.equal(tensor(args["ids"]), truth["ids"])
    mine = outputs(SPEC, args, truth)["weights"]
    SPEC.stock(**args)
    assert mine <= 2 * outputs(SPEC, args, truth)["weights"] + 2 * 2.0**-23
    assert launches.tolist() == [0] * 4 + [1] + [0] * 11
