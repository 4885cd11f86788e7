"""Entries of a page behind the request's end are multiplied with zero instead of left out, and a NaN survives that."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "page_tail_leaks_nan",
    op="mla_attend",
    title="Entries of a page behind the request's end are multiplied with zero instead of left out, and a NaN survives that.",
    report="vllm-project/vllm#40047",
    fault={
        "keys = buffer.view(-1, buffer.shape[2])[: min(len(run) * PAGE_SIZE, length - begin)]": "keys = buffer.view(-1, buffer.shape[2])[: len(run) * PAGE_SIZE]",
    },
    repaired={
        "[: min(len(run) * PAGE_SIZE, length - begin)]": ".narrow(0, 0, min(len(run) * PAGE_SIZE, length - begin))",
    },
    function="_attend",
)
