"""The gated MLP on a few multiprocessors: its source in lockstep on the CPU; compilation; values on a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import narrow_mlp as op
from k3_decode.cute import situ_mlp
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import LAUNCH_SLOTS, Cell
from k3_decode.ops.situ_mlp import SPEC, oracle, situ
from k3_decode.shapes import K3

from tests.k3_decode.cute.lockstep import run_kernel
from tests.k3_decode.op_errors import outputs, tensor


def operands(tokens: int, hidden: int, inter: int) -> dict[str, torch.Tensor]:
    """x with a gap between its rows, and weights, as bf16."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).mul_(size[-1] ** -0.5).to(torch.bfloat16)

    x = torch.randn(tokens, hidden + 8, generator=generator).to(torch.bfloat16)[:, :hidden]
    return {
        "x": x, "gate_up_weight": normal(2 * inter, hidden) * 2, "down_weight": normal(hidden, inter),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "inter", "blocks", "first"),
    [(1, 64, 2, 0), (3, 96, 3, 0), (8, 32, 1, 0), (2, 96, 2, 64), (3, 64, 2, 64)],
)
def test_the_source_in_lockstep_agrees_with_the_oracle(
    tokens: int, inter: int, blocks: int, first: int
) -> None:
    given = operands(tokens, 512, inter)
    prepared = situ_mlp.prepare(gate_up_weight=given["gate_up_weight"], down_weight=given["down_weight"])
    form = op.Form(512, inter, blocks, first)
    workspace = torch.zeros(op.workspace_bytes(), dtype=torch.uint8)
    hidden = torch.full((tokens, inter + 8), float("nan"), dtype=torch.bfloat16)[:, :inter]
    gate, up = (given["x"].float() @ given["gate_up_weight"].float().T).chunk(2, dim=1)
    hidden[:, :first] = situ(gate, up)[:, :first].to(torch.bfloat16)
    out = torch.full((tokens, 512), float("nan"), dtype=torch.bfloat16)
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)
    arguments = [given["x"], prepared.gate_up, prepared.down, hidden, workspace, out, launches, form]
    run_kernel(
        op, "_mlp", arguments, grid=(blocks, 1, 1), cluster=blocks, threads=op.THREADS,
        dynamic_bytes=form.shared_bytes,
    )  # fmt: skip
    truth = oracle(**given)["out"]
    errors = (out.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert errors.max() < 2 * 2.0**-8  # hidden values and outputs are rounded to bf16 once each
    assert launches.tolist() == [0] * 6 + [1] + [0] * (LAUNCH_SLOTS - 7)


def test_each_block_of_k3s_form_takes_a_multiprocessor_of_its_own() -> None:
    form = op.Form(7168, 768, 20)
    assert (form.steps_up, form.depth_down, form.turns_up, form.turns_down) == (14, 12, 10, 3)
    assert form.shared_bytes > 114 * 1024  # half of what a multiprocessor has


def test_nine_rows_are_refused_and_the_sibling_named() -> None:
    prepared = situ_mlp.PreparedMlp(torch.empty(128, 512), torch.empty(512, 64))
    with pytest.raises(ValueError, match=r"9 rows, widths 512 and 64.*use situ_mlp"):
        op.narrow_mlp(
            x=torch.empty(9, 512), prepared=prepared, hidden=torch.empty(9, 64), workspace=torch.empty(0),
            out=torch.empty(9, 512), blocks=2, launches=torch.empty(0),
        )  # fmt: skip


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(architecture: str, tmp_path: Path) -> None:
    name = "narrow_mlp_d7168_i384_f0_b20"
    command = [
        sys.executable,
        "-m",
        "k3_decode.compile",
        "--arch",
        architecture,
        "--out",
        str(tmp_path),
        name,
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(op.__file__).parents[2])}
    subprocess.run(command, check=True, capture_output=True, env=env)
    ptx = (tmp_path / architecture / f"{name}.ptx").read_text()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert before.count("ld.weak.global") == 14
    assert "ld.global" not in before
    assert "cp.async" not in before
    assert "griddepcontrol" not in after  # the next kernel waits for the whole of it


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tp", "tokens", "regime"), [(8, 1, "gaussian"), (8, 8, "large"), (16, 3, "heavy_tail")]
)
def test_matches_the_oracle_within_stocks_error_on_the_gpu(
    tp: int, tokens: int, regime: str, gpu: Any
) -> None:
    args = SPEC.make_args(Cell(K3.rank(tp), tokens), regime, torch.Generator().manual_seed(2), gpu)
    truth = SPEC.oracle(args)
    x, out = tensor(args["x"]), tensor(args["out"])
    gate_up, down = tensor(args["gate_up_weight"]), tensor(args["down_weight"])
    space = torch.zeros(op.workspace_bytes(), dtype=torch.uint8, device=gpu)
    hidden = torch.full((tokens, down.shape[1]), float("nan"), dtype=torch.bfloat16, device=gpu)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    prepared = situ_mlp.prepare(gate_up_weight=gate_up, down_weight=down)
    for _ in range(3):
        op.narrow_mlp(
            x=x, prepared=prepared, hidden=hidden, workspace=space, out=out, blocks=20, launches=launches
        )
    mine = outputs(SPEC, args, truth)["out"]
    SPEC.stock(**args)
    assert mine <= 2 * outputs(SPEC, args, truth)["out"] + 2 * 2.0**-8
    assert launches.tolist() == [0] * 6 + [3] + [0] * 9
    assert space[:12].tolist() == [0] * 12
