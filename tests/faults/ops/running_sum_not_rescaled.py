"""When a later chunk of keys brings a larger score, what was summed before is not rescaled: seen above one chunk only."""

from tests.faults.planting import LONGEST, op_fault

FAULT = op_fault(
    "running_sum_not_rescaled",
    op="mla_attend",
    title="When a later chunk of keys brings a larger score, what was summed before is not rescaled.",
    report="ROCm/rocMLIR#2371",
    fault={
        "mix.mul_(kept), shares": "mix, shares",
    },
    repaired={
        "mix.mul_(kept), shares": "mix.mul(kept), shares",
    },
    function="_attend",
    cells=(LONGEST,),
)
