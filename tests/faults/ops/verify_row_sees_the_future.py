"""A row of a verify step attends to the draft behind it: teacher-forced drafts then look better than they are."""

from tests.faults.planting import VERIFY, op_fault

FAULT = op_fault(
    "verify_row_sees_the_future",
    op="mla_attend",
    title="A row of a verify step attends to the draft behind it.",
    report="vllm-project/vllm#49918",
    fault={
        "newest = torch.arange(length - rows, length)": "newest = torch.arange(length - rows + 1, length + 1)",
    },
    repaired={
        "newest = torch.arange(length - rows, length)": "newest = torch.arange(rows).add_(length - rows)",
    },
    function="_attend",
    cells=(VERIFY,),
)
