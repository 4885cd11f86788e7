"""The norm after the mix leaves out epsilon, which decides tiny rows."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "residual_epsilon_missing",
    op="attn_res",
    title="The norm after the mix leaves out epsilon, which decides tiny rows.",
    report="intel/ipex-llm#9529",
    fault={
        ".add_(eps).rsqrt_()": ".rsqrt_()",
    },
    repaired={
        ".add_(eps).rsqrt_()": ".add(eps).rsqrt_()",
    },
    function="_inverse_root",
)
