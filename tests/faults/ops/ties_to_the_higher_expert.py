"""Experts with equal scores are taken in the other order than stock takes them in."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "ties_to_the_higher_expert",
    op="router",
    title="Experts with equal scores are taken in the other order than stock takes them in.",
    report="vllm-project/vllm#54403",
    fault={
        "torch.arange(experts - 1, -1, -1)": "torch.arange(experts)",
        "chosen = experts - 1 - (best & 0xFFFFFFFF)": "chosen = best & 0xFFFFFFFF",
    },
    repaired={
        "torch.arange(experts - 1, -1, -1)": "torch.arange(experts).flip(0)",
    },
)
