"""Every timed step also takes a prompt in, in both arms alike, so that the gain looks small or none."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import engine_fault

TEXT = list(range(1, 9))


def fault(sound: Callable[..., Any], check: Any, context: Any, arm: str, session: Any) -> Callable[[], Any]:
    live: list[int] = []

    def step() -> Any:
        session.finish(live)
        live[:] = session.prefill([TEXT])[0]
        return session.decode(live, TEXT[:1])

    return step


def repaired(
    sound: Callable[..., Any], check: Any, context: Any, arm: str, session: Any
) -> Callable[[], Any]:
    work = sound(check, context, arm, session)
    return lambda: work()


FAULT = engine_fault(
    "prefill_inside_the_step",
    title="Every timed step also takes a prompt in, in both arms alike, so that the gain looks small or none.",
    report="tile-ai/TileOPs#695",
    at="harness.stages.sweep.sampling:_step_work",
    fault=fault,
    repaired=repaired,
    checks=("sweep/decode_step/cpu.tp1.dcp1.b1.c64",),
    expected="sweep",
    target="timing",
)
