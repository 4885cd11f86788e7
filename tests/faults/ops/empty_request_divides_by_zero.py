"""A request without keys divides zero by zero."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "empty_request_divides_by_zero",
    op="mla_attend",
    title="A request without keys divides zero by zero.",
    report="flashinfer-ai/flashinfer#4401",
    fault={
        "mix.div_(torch.where(has_keys, total, 1.0))": "mix.div_(total)",
    },
    repaired={
        "mix.div_(torch.where(has_keys, total, 1.0))": "mix.div_(total.masked_fill(~has_keys, 1.0))",
    },
    function="_attend",
)
