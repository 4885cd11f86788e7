"""The shared expert's output is added by each rank and summed again."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "shared_expert_added_by_every_rank",
    op="latent_tail",
    title="The shared expert's output is added by each rank and summed again.",
    report="vllm-project/vllm#49366",
    fault={
        "torch.addcmul(shared.float(),": "torch.addcmul(shared.float() * 2,",
    },
    repaired={
        "torch.addcmul(shared.float(),": "torch.addcmul(shared.to(torch.float32),",
    },
)
