"""A step changes a weight for its own use and puts it back: another thread would have read it."""

from typing import Any

from tests.faults.planting import step_fault


def borrow(engine: Any) -> None:
    weight = engine._ranks[0].final_norm
    weight.mul_(2)
    weight.div_(2)


def read(engine: Any) -> None:
    engine._ranks[0].final_norm.mul(2)


FAULT = step_fault(
    "weight_written_and_put_back",
    title="A step changes a weight for its own use and puts it back: another thread would have read it.",
    report="NVIDIA/TensorRT-LLM#13278",
    fault=borrow,
    repaired=read,
)
