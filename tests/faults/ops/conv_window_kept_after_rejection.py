"""The convolution's window keeps the activations of rejected drafts."""

from tests.faults.planting import VERIFY, op_fault

FAULT = op_fault(
    "conv_window_kept_after_rejection",
    op="kda_step",
    title="The convolution's window keeps the activations of rejected drafts.",
    report="vllm-project/vllm#50272",
    fault={
        "first[:, None] + torch.arange(3)": "first[:, None] * 0 + torch.arange(3)",
    },
    repaired={
        "first[:, None] + torch.arange(3)": "torch.arange(3) + first[:, None]",
    },
    cells=(VERIFY,),
)
