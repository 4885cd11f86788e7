"""A fast step also writes the state of a request that is not in it."""

from typing import Any

from tests.faults.planting import step_fault


def write(engine: Any, slot: int) -> None:
    engine._pool.caches[0].kda[0].recurrent[slot] += 1e-3


FAULT = step_fault(
    "neighbours_slot_written",
    title="A fast step also writes the state of a request that is not in it.",
    report="NVIDIA/TensorRT-LLM#13278",
    fault=lambda engine: write(engine, 0),
    repaired=lambda engine: write(engine, next(iter(engine._requests.values())).slots[0]),
)
