"""A new request starts from the state that the slot's former owner left."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "slot_not_cleared",
    title="A new request starts from the state that the slot's former owner left.",
    report="sgl-project/sglang#17404",
    target="engine",
    at="k3_decode.state:Pool.admit",
    fault={"state.recurrent[request.slots[0]] = 0": "pass"},
    repaired={"state.recurrent[request.slots[0]] = 0": "state.recurrent[request.slots[0]].zero_()"},
    checks=("coverage/reuse/",),
    expected="coverage",
)
