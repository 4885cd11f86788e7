"""A fast step leaves a hook behind that runs at every module's forward, of whatever model."""

from typing import Any

from tests.faults.planting import step_fault

KEPT: list[Any] = []


def leave(_engine: Any) -> None:
    from torch.nn.modules.module import register_module_forward_hook

    KEPT.append(register_module_forward_hook(lambda *_: None))


def leave_and_remove(engine: Any) -> None:
    leave(engine)
    undo()


def undo() -> None:
    while KEPT:
        KEPT.pop().remove()


FAULT = step_fault(
    "module_hook_left",
    title="A fast step leaves a hook behind that runs at every module's forward, of whatever model.",
    report="pytorch/pytorch#146554",
    fault=leave,
    repaired=leave_and_remove,
    undo=undo,
)
