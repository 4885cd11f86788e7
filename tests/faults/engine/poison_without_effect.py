"""Making the op wrong on purpose changes nothing, so the eval says nothing about it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import wrapped


def plant(is_repaired: bool) -> AbstractContextManager[None]:
    def poison(sound: Callable[..., Any], table: Any, op: str, scale: float) -> Any:
        return sound(table, op, scale) if is_repaired else table

    return wrapped("k3_decode.engine:poisoned", poison)


FAULT = Fault(
    name="poison_without_effect",
    title="Making the op wrong on purpose changes nothing, so the eval says nothing about it.",
    report="vllm-project/vllm#46142",
    target="eval",
    expected="coverage",
    scene=PatchScene(plant, ("coverage/poison/mla_value", "coverage/poison/router")),
)
