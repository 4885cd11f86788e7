"""The chosen experts' weights are not divided by their sum."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "weights_not_renormalised",
    op="router",
    title="The chosen experts' weights are not divided by their sum.",
    report="flashinfer-ai/flashinfer#3875",
    fault={
        "picked / picked.sum(1, keepdim=True).add_(1e-20) * scale": "picked * scale",
    },
    repaired={
        "picked / picked.sum(1, keepdim=True).add_(1e-20) * scale": "picked.div(picked.sum(1, keepdim=True) + 1e-20) * scale",
    },
)
