"""The state is read before it decays, so each output belongs to an older state."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "decay_after_the_read",
    op="kda_step",
    title="The state is read before it decays, so each output belongs to an older state.",
    report="fla-org/flash-linear-attention#885",
    fault={
        "dim=-1).mul_(decay.unsqueeze(-1))": "dim=-1)",
    },
    repaired={
        "dim=-1).mul_(decay.unsqueeze(-1))": "dim=-1).mul_(decay[..., None])",
    },
)
