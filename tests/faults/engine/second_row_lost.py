"""A verify step keeps one row fewer than were accepted."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "second_row_lost",
    title="A verify step keeps one row fewer than were accepted.",
    report="vllm-project/vllm#47123",
    target="engine",
    at="k3_decode.state:Pool.accept",
    fault={"request.length += count": "request.length += max(1, count - 1)"},
    repaired={"request.length += count": "request.length = request.length + count"},
    checks=("coverage/verify/", "coverage/path/{arch}.tp1.dcp1.b1.c24.d1.bf16.verify"),
    expected="coverage",
)
