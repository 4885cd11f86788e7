"""After some steps the dispatcher goes over to stock and stays there."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "fallback_after_a_while",
    title="After some steps the dispatcher goes over to stock and stays there.",
    report="vllm-project/vllm#54360",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, not self.is_on or facts.step > 20)"},
    repaired={"(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, not self.is_on or facts.step < 0)"},
    checks=("evals/drift", "coverage/path/{arch}.tp1.dcp1.b1.c24.d0.bf16.decode"),
    expected="evals",
)
