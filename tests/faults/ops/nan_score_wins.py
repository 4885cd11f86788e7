"""An expert whose score is NaN is selected first."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "nan_score_wins",
    op="router",
    title="An expert whose score is NaN is selected first.",
    report="ROCm/aiter#5009",
    fault={
        "nan_to_num_(nan=-torch.inf": "nan_to_num_(nan=torch.inf",
    },
    repaired={
        "nan_to_num_(nan=-torch.inf": "nan_to_num(nan=-torch.inf",
    },
)
