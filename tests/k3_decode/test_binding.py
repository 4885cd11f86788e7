"""Binding an op to an implementation: what a launch needs is there before any GPU is."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.binding import bind
from k3_decode.op_table import load_ops
from k3_decode.ops import OPS
from k3_decode.ops.contract import LAUNCH_SLOTS, OP_NAMES, Cell
from k3_decode.shapes import CANARY, K3, NANO, RankShapes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "shapes", [K3.rank(8), K3.rank(16), CANARY.rank(1), NANO.rank(2)], ids=lambda s: f"{s.model.name}{s.tp}"
)
def test_the_gpu_implementation_has_every_op_for_a_rank(shapes: RankShapes) -> None:
    assert set(OP_NAMES) <= set(load_ops("cute", shapes, CPU))


@pytest.mark.parametrize("op", OP_NAMES)
def test_an_op_of_the_gpu_implementation_takes_its_weights_without_a_gpu(op: str) -> None:
    generator = torch.Generator().manual_seed(1)
    args = OPS[op].make_args(Cell(CANARY.rank(1), 2), "gaussian", generator, CPU)
    call = bind(op, "cute", args, torch.zeros(LAUNCH_SLOTS, dtype=torch.int32))
    assert callable(call)
