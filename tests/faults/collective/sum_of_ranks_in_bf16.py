"""Partial sums of ranks are rounded to bf16 after every rank, in an order that differs between them."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "sum_of_ranks_in_bf16",
    title="Partial sums of ranks are rounded to bf16 after every rank, in an order that differs between them.",
    report="vllm-project/vllm#42960",
    target="collective",
    at="k3_decode.collectives.meetings:_combined",
    fault={"total = total + part.part.float()": "total = (total + part.part.float()).bfloat16().float()"},
    repaired={"total = total + part.part.float()": "total = torch.add(total, part.part.float())"},
    checks=("coverage/collective/",),
    expected="coverage",
)
