"""A row whose slot is -1 lands in the last slot of the cache."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "padding_slot_written",
    op="mla_query",
    title="A row whose slot is -1 lands in the last slot of the cache.",
    report="vllm-project/vllm#43810",
    fault={
        "torch.nonzero(slot_mapping >= 0).squeeze(1)": "torch.arange(slot_mapping.shape[0])",
    },
    repaired={
        "torch.nonzero(slot_mapping >= 0).squeeze(1)": "torch.where(slot_mapping >= 0)[0]",
    },
)
