"""exp of raw scores: fine on unit normals, infinite on large ones."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "softmax_without_a_maximum",
    op="mla_attend",
    title="exp of raw scores: fine on unit normals, infinite on large ones.",
    report="pytorch/executorch#18407",
    fault={
        "base = highest.masked_fill(highest == -torch.inf, 0.0)": "base = torch.zeros_like(highest)",
        "peak = highest": "peak = base",
    },
    repaired={
        "base = highest.masked_fill(highest == -torch.inf, 0.0)": "base = torch.where(highest == -torch.inf, 0.0, highest)",
    },
    function="_attend",
)
