"""Requests with unlike numbers of drafts share one fast step, which reads them at the longest one's stride."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "uneven_drafts_taken",
    title="Requests with unlike numbers of drafts share one fast step, which reads them at the longest one's stride.",
    report="vllm-project/vllm#53051",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"len(set(facts.rows_by_request)) > 1": "len(facts.rows_by_request) < 1"},
    repaired={
        "len(set(facts.rows_by_request)) > 1": "min(facts.rows_by_request) != max(facts.rows_by_request)"
    },
    checks=("coverage/uneven/",),
    expected="coverage",
)
