"""The halves of the first product are taken as up and gate."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "gate_and_up_swapped",
    op="experts",
    title="The halves of the first product are taken as up and gate.",
    report="sgl-project/sglang#32430",
    fault={
        "situ_(both[..., : double // 2], both[..., double // 2 :])": "situ_(both[..., double // 2 :], both[..., : double // 2])",
    },
    repaired={
        "situ_(both[..., : double // 2], both[..., double // 2 :])": "situ_(*both.split(double // 2, dim=-1))",
    },
    function="_all_at_once",
)
