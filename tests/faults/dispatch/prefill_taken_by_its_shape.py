"""Whether a step is a verify step is told from its shape, so a prefill of uniform rows takes the fast path."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "prefill_taken_by_its_shape",
    title="Whether a step is a verify step is told from its shape, so a prefill of uniform rows takes the fast path.",
    report="vllm-project/vllm#49918",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"facts.phase not in envelope.phases": "len(set(facts.rows_by_request)) > 1"},
    repaired={"facts.phase not in envelope.phases": "facts.phase not in set(envelope.phases)"},
    checks=("coverage/decline/prefill", "kernels/router/guard/cpu"),
    expected="coverage",
)
