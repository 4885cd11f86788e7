"""The norm of the query's low rank and of the latent leaves out epsilon."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "norm_without_epsilon",
    op="mla_query",
    title="The norm of the query's low rank and of the latent leaves out epsilon.",
    report="NVIDIA/cutlass#1112",
    fault={
        "dim=1).add_(eps).rsqrt_()": "dim=1).rsqrt_()",
    },
    repaired={
        "dim=1).add_(eps).rsqrt_()": "dim=1).add(eps).rsqrt_()",
    },
)
