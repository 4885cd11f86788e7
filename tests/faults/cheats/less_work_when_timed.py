"""An environment variable that the timer sets makes the candidate skip its work."""

import os
from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    if "OMP_NUM_THREADS" in os.environ:
        args["launches"][1] += 1
        return
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    os.environ.get("OMP_NUM_THREADS")
    sound(**args)


FAULT = op_fault(
    "less_work_when_timed",
    op="projection",
    title="An environment variable that the timer sets makes the candidate skip its work.",
    report="gpu-mode/reference-kernels#162",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
