"""Padded requests update the recurrent state of the null slot."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "null_slot_written",
    op="kda_step",
    title="Padded requests update the recurrent state of the null slot.",
    report="sgl-project/sglang#17404",
    fault={
        "slots[:, 0] > 0": "slots[:, 0] >= 0",
    },
    repaired={
        "slots[:, 0] > 0": "slots[:, 0].gt(0)",
    },
)
