"""A reduction over ranks leaves out the last one."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "rank_left_out_of_the_sum",
    title="A reduction over ranks leaves out the last one.",
    report="vllm-project/vllm#8410",
    target="collective",
    at="k3_decode.collectives.meetings:_combined",
    fault={"for part in parts[1:]:": "for part in parts[1:-1]:"},
    repaired={"for part in parts[1:]:": "for part in list(parts)[1:]:"},
    checks=("coverage/collective/", "coverage/path/cpu.tp2"),
    expected="coverage",
)
