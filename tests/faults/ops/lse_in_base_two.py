"""The log-sum-exp that the merge needs is given in base 2."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "lse_in_base_two",
    op="mla_attend",
    title="The log-sum-exp that the merge needs is given in base 2.",
    report="sgl-project/sglang#33926",
    fault={
        "peak + total.log()": "(peak + total.log()) * 1.4426950408889634",
    },
    repaired={
        "peak + total.log()": "total.log() + peak",
    },
    function="_attend",
)
