"""The fast path runs although the switch is off, so both arms of a comparison are the same."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "switch_ignored",
    title="The fast path runs although the switch is off, so both arms of a comparison are the same.",
    report="pytorch/pytorch#146554",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={"(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, False)"},
    repaired={"(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, self.is_on is False)"},
    checks=("coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode",),
    expected="coverage",
)
