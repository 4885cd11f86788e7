"""The gated MLP kernel: packing and fragment maps replayed on the CPU; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import situ_mlp as op
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import Cell
from k3_decode.ops.situ_mlp import SPEC
from k3_decode.shapes import CANARY, K3, NANO

from tests.k3_decode.op_errors import outputs, tensor


def product(form: op.Form, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x times the packed rows, read block by block, warp by warp and step by step as the kernel does."""
    words = packed.view(torch.bfloat16).double()
    quads, steps = form.tiles // op.QUAD, form.width // op.STEP
    result = torch.zeros(x.shape[0], form.rows, dtype=torch.float64)
    for group in range(form.rows // op.TILE // form.tiles):
        for share in range(form.cluster * form.warps):
            for part in range(form.parts):
                for quad in range(quads):
                    start = ((group * quads + quad) * steps + share * form.steps) * op.STEP_BYTES // 2
                    start += part * form.stage_steps * op.STEP_BYTES // 2
                    for s in range(form.stage_steps):
                        k = (share * form.steps + part * form.stage_steps + s) * op.STEP
                        size = op.STEP_BYTES // 2
                        piece = words[start + s * size : start + (s + 1) * size].view(2, 8, 4, 2, 4)
                        for tile in range(op.QUAD):
                            rows = piece[tile // 2, :, :, tile % 2].reshape(op.TILE, op.STEP)
                            at = (group * form.tiles + quad * op.QUAD + tile) * op.TILE
                            result[:, at : at + op.TILE] += x[:, k : k + op.STEP].double() @ rows.T
    return result


@pytest.mark.parametrize("capacity", op.CAPACITIES)
@pytest.mark.parametrize(("hidden", "inter"), [(192, 64), (128, 32), (256, 128)])
def test_packed_weights_multiply_like_the_rows_they_came_from(hidden: int, inter: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(2 * inter, hidden, generator=generator).bfloat16()
    down = torch.randn(hidden, inter, generator=generator).bfloat16()
    x = torch.randn(3, hidden, generator=generator).bfloat16()
    h = torch.randn(3, inter, generator=generator).bfloat16()
    prepared = op.prepare(gate_up_weight=gate_up, down_weight=down)
    both = product(op.Form(2 * inter, hidden, capacity, True), x, prepared.gate_up).view(3, -1, 4, 2)
    torch.testing.assert_close(both[..., 0].reshape(3, inter), x.double() @ gate_up[:inter].double().T)
    torch.testing.assert_close(both[..., 1].reshape(3, inter), x.double() @ gate_up[inter:].double().T)
    last = product(op.Form(hidden, inter, capacity, False), h, prepared.down)
    torch.testing.assert_close(last, h.double() @ down.double().T)


@pytest.mark.parametrize("variant", op.variants(), ids=lambda v: v.name)
def test_every_variant_fits_and_covers_its_matrix(variant: Any) -> None:
    form = variant.compile.__defaults__[0]
    assert form.shared_bytes <= 160 * 1024
    assert form.rows % (op.TILE * form.tiles) == 0
    assert form.cluster * form.warps * form.parts * form.stage_steps * op.STEP == form.width
    assert form.pairs % form.cluster == 0


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_streams_weights_but_no_activations_before_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("situ_mlp", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "cp.async.bulk" in before
    assert "ld.global" not in before
    assert "ld.global.v2" in after
    assert "ld.global.nc" not in ptx


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
