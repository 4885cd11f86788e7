"""The recurrent state is read in the other layout than it was written in."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "state_read_transposed",
    op="kda_step",
    title="The recurrent state is read in the other layout than it was written in.",
    report="vllm-project/vllm#41292",
    fault={
        "memory = state[targets[begin]]": "memory = state[targets[begin]].transpose(-1, -2).contiguous()",
    },
    repaired={
        "memory = state[targets[begin]]": "memory = state[targets[begin]].clone()",
    },
)
