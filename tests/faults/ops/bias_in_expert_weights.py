"""The selection bias ends up in the weights of the experts too."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "bias_in_expert_weights",
    op="router",
    title="The selection bias ends up in the weights of the experts too.",
    report="vllm-project/vllm#12002",
    fault={
        "picked = scores.gather(1, chosen)": "picked = (scores + bias).gather(1, chosen)",
    },
    repaired={
        "picked = scores.gather(1, chosen)": "picked = torch.gather(scores, 1, chosen)",
    },
)
