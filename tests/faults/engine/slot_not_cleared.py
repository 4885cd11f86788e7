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
    checks=("coverage/path/cpu.tp1.dcp1.b2.c24.d0.bf16.decode", "coverage/state"),
    expected="coverage",
    gap="both arms share slots and prefill, and the one eval with an oracle admits each slot once",
)
