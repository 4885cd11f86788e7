"""After a rejection the state goes on from the last draft's slot, not from the last accepted one."""

from tests.faults.planting import VERIFY, op_fault

FAULT = op_fault(
    "rejected_drafts_kept",
    op="kda_step",
    title="After a rejection the state goes on from the last draft's slot, not from the last accepted one.",
    report="vllm-project/vllm#39273",
    fault={
        "else accepted[live].long() - 1": "else torch.zeros_like(home)",
    },
    repaired={
        "else accepted[live].long() - 1": "else (accepted[live] - 1).long()",
    },
    cells=(VERIFY,),
)
