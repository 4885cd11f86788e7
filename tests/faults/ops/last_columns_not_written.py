"""The last block of columns is skipped where the width is no multiple of the tile."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "last_columns_not_written",
    op="projection",
    title="The last block of columns is skipped where the width is no multiple of the tile.",
    report="ROCm/aiter#5009",
    fault={
        "out.copy_(torch.mm(x.float(), weight.float().T))": "out[:, :-1].copy_(torch.mm(x.float(), weight.float().T)[:, :-1])",
    },
    repaired={
        "out.copy_(torch.mm(x.float(), weight.float().T))": "out[:, :-1].copy_(torch.mm(x.float(), weight.float().T)[:, :-1])\n        out[:, -1:].copy_(torch.mm(x.float(), weight.float().T[:, -1:]))",
    },
)
