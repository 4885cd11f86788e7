"""An op that waits for the device is put into a captured graph."""

from harness.domain.machine import Tier
from tests.faults.planting import engine_fault

LINE = "    plan = plan_for(rows, k, tokens, has_warpgroups())"

FAULT = engine_fault(
    "op_not_safe_to_capture",
    title="An op that waits for the device is put into a captured graph.",
    report="vllm-project/vllm#52205",
    at="k3_decode.cute.projection:projection",
    fault={LINE: f"    x[0, 0].item()\n{LINE}"},
    repaired={LINE: f"    x[0, 0]\n{LINE}"},
    checks=("kernels/projection/k3/sm_90a.tp16.dcp1.b2.c1024.d0.",),
    expected="kernels",
    target="kernel",
    tier=Tier.RANK,
)
