"""A step outside the envelope is declined for a reason that stands in no list, so nobody can count it."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "declined_for_no_known_reason",
    title="A step outside the envelope is declined for a reason that stands in no list, so nobody can count it.",
    report="NVIDIA/TensorRT-LLM#18599",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher.decide",
    fault={"reason=reason,": 'reason=reason if is_taken or not self.is_on else "not_now",'},
    repaired={"reason=reason,": "reason=Reason(reason),"},
    checks=("coverage/decline/batch_above_max",),
    expected="coverage",
)
