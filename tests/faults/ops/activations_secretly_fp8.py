"""Activations are rounded to fp8 on the way in, where the claim says bf16."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "activations_secretly_fp8",
    op="situ_mlp",
    title="Activations are rounded to fp8 on the way in, where the claim says bf16.",
    report="anthony-chaudhary/dos-kernel#107",
    fault={
        "torch.mm(x.float(), gate_up_weight": "torch.mm(x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), gate_up_weight",
    },
    repaired={
        "torch.mm(x.float(), gate_up_weight": "torch.mm(x.to(torch.float32), gate_up_weight",
    },
)
