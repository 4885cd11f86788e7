"""Expert -1, which means nobody, indexes the last expert."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "skipped_expert_wraps",
    op="experts",
    title="Expert -1, which means nobody, indexes the last expert.",
    report="vllm-project/vllm#48371",
    fault={
        "skipped = int((touched < 0).sum())": "skipped = 0",
    },
    repaired={
        "skipped = int((touched < 0).sum())": "skipped = int(torch.count_nonzero(touched < 0))",
    },
)
