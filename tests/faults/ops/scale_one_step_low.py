"""Every third scale byte is read one power of two too low."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "scale_one_step_low",
    op="experts",
    title="Every third scale byte is read one power of two too low.",
    report="ROCm/FlyDSL#590",
    fault={
        "torch.arange(256, dtype=torch.float64) - 127": "torch.arange(256, dtype=torch.float64) - 127 - (torch.arange(256) % 3 == 0).double()",
    },
    repaired={
        "torch.arange(256, dtype=torch.float64) - 127": "torch.arange(-127, 129, dtype=torch.float64)",
    },
    function="_scale_table",
)
