"""Attention silently forgets the oldest tokens of a long context; the mean over short prompts hides it."""

from tests.faults.planting import LONG, op_fault

FAULT = op_fault(
    "oldest_context_dropped",
    op="mla_attend",
    title="Attention silently forgets the oldest tokens of a long context; the mean over short prompts hides it.",
    report="vllm-project/vllm#47930",
    fault={
        "scores = torch.mm(queries, keys.T).mul_(scale)": "scores = torch.mm(queries, keys.T).mul_(scale)\n        scores[:, : max(0, length - 128 - begin)] = -torch.inf",
    },
    repaired={
        "scores = torch.mm(queries, keys.T).mul_(scale)": "scores = torch.mm(queries, keys.T).mul_(scale)\n        scores[:, : max(0, -begin)] = -torch.inf",
    },
    function="_attend",
    cells=(LONG,),
)
