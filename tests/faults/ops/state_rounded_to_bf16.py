"""The recurrent state is rounded to bf16 at every step, and the error adds up with the context."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "state_rounded_to_bf16",
    op="kda_step",
    title="The recurrent state is rounded to bf16 at every step, and the error adds up with the context.",
    report="vllm-project/vllm#13466",
    fault={
        "memory = target.addcmul_(update.unsqueeze(2), key[i, t].unsqueeze(1))": "memory = target.copy_(target.addcmul(update.unsqueeze(2), key[i, t].unsqueeze(1)).bfloat16())",
    },
    repaired={
        "memory = target.addcmul_(update.unsqueeze(2), key[i, t].unsqueeze(1))": "memory = target.copy_(target.addcmul(update.unsqueeze(2), key[i, t].unsqueeze(1)))",
    },
)
