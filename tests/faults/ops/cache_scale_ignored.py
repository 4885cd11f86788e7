"""Scores are computed from fp8 cache values without their scale."""

from tests.faults.planting import FP8, op_fault

FAULT = op_fault(
    "cache_scale_ignored",
    op="mla_attend",
    title="Scores are computed from fp8 cache values without their scale.",
    report="vllm-project/vllm#46142",
    fault={
        "scale * kv_scale, buffer": "scale, buffer",
    },
    repaired={
        "scale * kv_scale, buffer": "kv_scale * scale, buffer",
    },
    cells=(FP8,),
)
