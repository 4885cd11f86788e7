"""One draft more than the claim allows is taken."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "drafts_off_by_one",
    title="One draft more than the claim allows is taken.",
    report="vllm-project/vllm#49918",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={
        "envelope.drafts[0] <= drafts <= envelope.drafts[1]": "envelope.drafts[0] <= drafts <= envelope.drafts[1] + 1"
    },
    repaired={
        "envelope.drafts[0] <= drafts <= envelope.drafts[1]": "envelope.drafts[0] <= drafts < envelope.drafts[1] + 1"
    },
    checks=("kernels/router/guard/cpu", "coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode"),
    expected="kernels",
)
