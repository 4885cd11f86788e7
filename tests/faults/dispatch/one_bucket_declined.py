"""The dispatcher silently sends one batch bucket of the claim to stock."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "one_bucket_declined",
    title="The dispatcher silently sends one batch bucket of the claim to stock.",
    report="vllm-project/vllm#46142",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"envelope.bucket(requests) is None": "envelope.bucket(requests) in (None, 8)"},
    repaired={"envelope.bucket(requests) is None": "envelope.bucket(requests) not in envelope.batch_buckets"},
    checks=("coverage/path/{arch}.tp1.dcp1.b8.c24.d0.bf16.decode", "kernels/router/guard/cpu"),
    expected="coverage",
)
