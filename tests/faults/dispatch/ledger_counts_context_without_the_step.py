"""The ledger tells contexts as they were before the step, so that a band's edge is booked below it."""

from tests.faults.planting import PATH_CHECK, engine_fault

FAULT = engine_fault(
    "ledger_counts_context_without_the_step",
    title="The ledger tells contexts as they were before the step, so that a band's edge is booked below it.",
    report="NVIDIA/TensorRT-LLM#18599",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher.decide",
    fault={"context_max=facts.context_max,": "context_max=facts.context_max - rows,"},
    repaired={"context_max=facts.context_max,": "context_max=max(facts.context_max, facts.context_min),"},
    checks=(PATH_CHECK,),
    expected="coverage",
)
