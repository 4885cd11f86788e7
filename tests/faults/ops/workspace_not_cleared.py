"""The product is added to what the output buffer held before."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "workspace_not_cleared",
    op="projection",
    title="The product is added to what the output buffer held before.",
    report="NVIDIA/cutlass#3538",
    fault={
        "out.copy_(torch.mm(x.float(), weight.float().T))": "out.add_(torch.mm(x.float(), weight.float().T))",
    },
    repaired={
        "out.copy_(torch.mm(x.float(), weight.float().T))": "out.zero_().add_(torch.mm(x.float(), weight.float().T))",
    },
)
