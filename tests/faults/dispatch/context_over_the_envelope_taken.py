"""The longest context is compared with the wrong end of the range, so no context is too long."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "context_over_the_envelope_taken",
    title="The longest context is compared with the wrong end of the range, so no context is too long.",
    report="vllm-project/vllm#52109",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"facts.context_max <= envelope.context[1]": "facts.context_min <= facts.context_max"},
    repaired={"facts.context_max <= envelope.context[1]": "envelope.context[1] >= facts.context_max"},
    checks=("kernels/router/guard/cpu", "coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode"),
    expected="kernels",
)
