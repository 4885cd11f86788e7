"""Recorded activations: what is kept, and how rows of other widths are made of it."""

import torch
from k3_decode.ops import OPS
from k3_decode.ops.contract import Cell
from k3_decode.ops.recorded import recorded_rows
from k3_decode.shapes import NANO


def test_every_op_has_recorded_inputs_that_differ_from_unit_normals() -> None:
    cell = Cell(NANO.rank(1), 3, 1, 65, "bf16")
    for name, op in OPS.items():
        sets = [
            op.make_args(cell, regime, torch.Generator().manual_seed(5), torch.device("cpu"))
            for regime in ("recorded", "gaussian")
        ]
        differs = [
            key for key, value in sets[0].items()
            if isinstance(value, torch.Tensor) and value.shape == sets[1][key].shape
            and not torch.equal(value.nan_to_num(), sets[1][key].nan_to_num())
        ]  # fmt: skip
        assert differs, name


def test_a_narrow_row_is_cut_out_of_a_recorded_one_and_a_wide_row_takes_several() -> None:
    narrow = recorded_rows("projection.x", (5, 64), torch.Generator().manual_seed(1))
    wide = recorded_rows("projection.x", (2, 500), torch.Generator().manual_seed(1))
    assert narrow.shape == (5, 64)
    assert wide.shape == (2, 500)
    assert bool(wide.isfinite().all())
    first = recorded_rows("projection.x", (24, 192), torch.Generator().manual_seed(2))
    assert any(torch.equal(wide[0, :192], row) for row in first)


def test_the_claimed_models_width_comes_from_its_own_slice() -> None:
    rows = recorded_rows("moe_front.x", (3, 7168), torch.Generator().manual_seed(1))
    assert rows.shape == (3, 7168)
    halves = rows[:, :3584], rows[:, 3584:]
    assert not torch.equal(*halves)  # one row of its own width, not a narrow one repeated
