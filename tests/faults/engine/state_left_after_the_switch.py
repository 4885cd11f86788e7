"""Once the fast path has run, stock's own step is another one, though the switch is off again."""

from typing import Any

from tests.faults.planting import engine_fault


def stays(sound: Any, engine: Any, live: Any, rows: Any, *, is_optimised: bool) -> Any:
    out = sound(engine, live, rows, is_optimised=is_optimised)
    if is_optimised:
        engine.was_fast = True
    return out * 1.01 if getattr(engine, "was_fast", False) and not is_optimised else out


def goes(sound: Any, engine: Any, live: Any, rows: Any, *, is_optimised: bool) -> Any:
    return sound(engine, live, rows, is_optimised=is_optimised)


FAULT = engine_fault(
    "state_left_after_the_switch",
    title="Once the fast path has run, stock's own step is another one, though the switch is off again.",
    report="vllm-project/vllm#52109",
    at="k3_decode.engine:Engine._run",
    fault=stays,
    repaired=goes,
    checks=("coverage/state",),
)
