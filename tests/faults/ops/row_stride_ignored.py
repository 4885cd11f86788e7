"""Rows are read as if they lay side by side, whatever the stride says."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "row_stride_ignored",
    op="projection",
    title="Rows are read as if they lay side by side, whatever the stride says.",
    report="vllm-project/vllm#3324",
    fault={
        "out.copy_(torch.mm(x.float(), weight.float().T))": "out.copy_(torch.mm(x.as_strided(x.shape, (x.shape[1], 1)).float(), weight.float().T))",
    },
    repaired={
        "out.copy_(torch.mm(x.float(), weight.float().T))": "out.copy_(torch.mm(x.contiguous().float(), weight.float().T))",
    },
)
