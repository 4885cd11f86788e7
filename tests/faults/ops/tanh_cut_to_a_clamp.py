"""A fast tanh is a clamp: right at zero and at infinity, wrong between."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "tanh_cut_to_a_clamp",
    op="situ_mlp",
    title="A fast tanh is a clamp: right at zero and at infinity, wrong between.",
    report="vllm-project/vllm#56579",
    fault={
        "mul_(up.div_(25.0).tanh_())": "mul_(up.div_(25.0).clamp_(-1.0, 1.0))",
    },
    repaired={
        "mul_(up.div_(25.0).tanh_())": "mul_(torch.tanh(up / 25.0))",
    },
    function="situ_",
)
