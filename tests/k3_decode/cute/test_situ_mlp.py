"""The gated MLP kernel: both products on an emulated grid; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import row_plan, row_sums
from k3_decode.cute import situ_mlp as op
from k3_decode.cute.row_plan import Plan
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import Cell
from k3_decode.ops.situ_mlp import SPEC
from k3_decode.shapes import CANARY, K3, NANO

from tests.k3_decode.cute.row_streams import streamed
from tests.k3_decode.op_errors import outputs, tensor


def halves(words: np.ndarray) -> np.ndarray:
    """The bf16 values of 4-byte words, as float64."""
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run_in_numpy(
    machine_of: Callable[..., Any], plan: Plan, x: np.ndarray, weight: np.ndarray, has_gate: bool
) -> np.ndarray:
    """What the traced functions write for these operands, which bf16 holds exactly."""
    tokens, rows = x.shape[0], weight.shape[0]
    machine = machine_of(op, plan, rows)
    columns = rows // 2 if has_gate else rows
    x_at, weight_at = machine.place_bf16(x), machine.place_bf16(weight)
    empty = np.full(tokens * columns // 2, 0x7FC07FC0, np.uint32)
    out_at = machine.place(empty, (tokens, columns), (columns, 1))
    place = row_plan.locate(plan)
    sums, _ = streamed(plan, place, [(op.ins.byte_address(weight_at), rows)], x_at)
    row_sums.finish(
        plan, place, sums, None, row_sums.Extent(tokens, rows), None, op._store_to(out_at, has_gate)
    )
    return halves(machine.read(out_at)).reshape(tokens, columns)


@pytest.mark.parametrize(
    "plan", [Plan(128, 8, 2, 1, 2, 1, 2), Plan(128, 16, 1, 1, 2, 2, 1)], ids=["one_block", "cluster_of_two"]
)
def test_gate_and_up_rows_meet_in_the_hidden_value_of_their_place(
    plan: Plan, numpy_machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op.ring, "situ", lambda gate, up: gate - 64 * up)
    random = np.random.default_rng(5)
    x, gate, up = (
        random.integers(-1, 2, size).astype(np.float64) for size in ((5, 128), (12, 128), (12, 128))
    )
    both = torch.from_numpy(np.concatenate([gate, up]))
    prepared = op.prepare(gate_up_weight=both, down_weight=torch.zeros(128, 12))
    hidden = run_in_numpy(numpy_machine, plan, x, prepared.gate_up.numpy(), has_gate=True)
    truth = x @ gate.T - 64 * (x @ up.T)
    assert np.abs(hidden - truth).max() <= 2.0**-8 * np.abs(truth).max()


def test_down_is_the_plain_product(numpy_machine: Callable[..., Any]) -> None:
    random = np.random.default_rng(6)
    x, weight = (random.integers(-1, 2, size).astype(np.float64) for size in ((3, 64), (24, 64)))
    assert np.array_equal(
        run_in_numpy(numpy_machine, Plan(64, 8, 1, 1, 2, 1, 1), x, weight, False), x @ weight.T
    )


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_streams_weights_but_no_activations_before_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("situ_mlp", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.weak.global" in before
    assert "ld.global.v4" not in before
    assert "ld.global.v4" in after


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shapes", "tokens", "regime"),
    [
        (K3.rank(8), 1, "gaussian"),
        (K3.rank(8), 8, "large"),
        (K3.rank(8), 64, "heavy_tail"),
        (K3.rank(16), 17, "strided_rows"),
        (K3.rank(8), 3, "dense"),
        (CANARY.rank(1), 9, "gaussian"),
        (NANO.rank(2), 16, "constant_rows"),
    ],
)
def test_matches_the_oracle_within_stocks_error_on_the_gpu(
    shapes: Any, tokens: int, regime: str, gpu: Any
) -> None:
    args = SPEC.make_args(Cell(shapes, tokens), regime, torch.Generator().manual_seed(2), gpu)
    truth = SPEC.oracle(args)
    x, out = tensor(args["x"]), tensor(args["out"])
    gate_up, down = tensor(args["gate_up_weight"]), tensor(args["down_weight"])
    space = torch.full((op.workspace_bytes(inter=down.shape[1]),), 255, dtype=torch.uint8, device=gpu)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    prepared = op.prepare(gate_up_weight=gate_up, down_weight=down)
    op.situ_mlp(x=x, prepared=prepared, workspace=space, out=out, launches=launches)
    mine = outputs(SPEC, args, truth)["out"]
    SPEC.stock(**args)
    assert mine <= 2 * outputs(SPEC, args, truth)["out"] + 2 * 2.0**-8
    assert launches.tolist() == [0] * 6 + [2] + [0] * 9
