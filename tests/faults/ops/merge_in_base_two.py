"""Partial attention is merged in base 2, but the shards' sums are natural logarithms."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "merge_in_base_two",
    op="mla_value",
    title="Partial attention is merged in base 2, but the shards' sums are natural logarithms.",
    report="vllm-project/vllm#41623",
    fault={
        "torch.softmax(logits, dim=0)": "torch.softmax(logits * 0.6931471805599453, dim=0)",
    },
    repaired={
        "torch.softmax(logits, dim=0)": "torch.softmax(logits * 1.4426950408889634 * 0.6931471805599453, dim=0)",
    },
)
