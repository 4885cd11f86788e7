"""The joint limit of rows a step counts requests, and drafts do not enter it."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "row_limit_counts_requests",
    title="The joint limit of rows a step counts requests, and drafts do not enter it.",
    report="vllm-project/vllm#53051",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"requests * rows > envelope.max_rows_per_step": "requests > envelope.max_rows_per_step"},
    repaired={"requests * rows > envelope.max_rows_per_step": "envelope.max_rows_per_step < requests * rows"},
    checks=("coverage/decline/rows_above_max", "kernels/router/guard/cpu"),
    expected="coverage",
)
