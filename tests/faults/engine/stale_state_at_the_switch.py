"""Switching to stock inside a request loses a part of the last fast step's state."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "stale_state_at_the_switch",
    title="Switching to stock inside a request loses a part of the last fast step's state.",
    report="vllm-project/vllm#41292",
    target="engine",
    at="k3_decode.engine:Engine.switch",
    fault={
        "self._dispatcher.is_on = is_on": "self._dispatcher.is_on = is_on\n    for state in self._pool.caches[0].kda.values():\n        state.recurrent.mul_(0.7)"
    },
    repaired={
        "self._dispatcher.is_on = is_on": "self._dispatcher.is_on = is_on\n    for state in self._pool.caches[0].kda.values():\n        state.recurrent.mul_(1.0)"
    },
    checks=("coverage/transition",),
    expected="coverage",
)
