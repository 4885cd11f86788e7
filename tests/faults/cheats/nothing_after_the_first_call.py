"""The first call computes; later calls leave the output as it is."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault

SEEN: set[int] = set()


def fault(sound: Callable[..., None], **args: Any) -> None:
    key = args["out"].data_ptr()
    if key in SEEN:
        args["launches"][1] += 1
        return
    SEEN.add(key)
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    SEEN.add(args["out"].data_ptr())
    sound(**args)


FAULT = op_fault(
    "nothing_after_the_first_call",
    op="projection",
    title="The first call computes; later calls leave the output as it is.",
    report="karpathy/llm.c#851",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
