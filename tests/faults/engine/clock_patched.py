"""The candidate replaces the clock that times it."""

import time

from tests.faults.planting import step_fault

BEFORE = time.perf_counter_ns


def patch(is_left: bool) -> None:
    time.perf_counter_ns = lambda: BEFORE() // 100
    if not is_left:
        undo()


def undo() -> None:
    time.perf_counter_ns = BEFORE


FAULT = step_fault(
    "clock_patched",
    title="The candidate replaces the clock that times it.",
    report="gpu-mode/reference-kernels#162",
    fault=lambda _: patch(is_left=True),
    repaired=lambda _: patch(is_left=False),
    undo=undo,
)
