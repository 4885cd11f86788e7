"""The dispatcher goes over to stock after its first hundred steps, when short tests have ended."""

from tests.faults.planting import PATH_CHECK, engine_fault

FAULT = engine_fault(
    "fallback_after_a_hundred_steps",
    title="The dispatcher goes over to stock after its first hundred steps, when short tests have ended.",
    report="vllm-project/vllm#54360",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, not self.is_on or facts.step > 100)"},
    repaired={"(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, not self.is_on or facts.step < 0)"},
    checks=("coverage/path/long_run", PATH_CHECK),
)
