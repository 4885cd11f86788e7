"""Rows above the sixth are not computed: the tests had no batch as large."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import WIDE, op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    args["out"][6:] = 0


def repaired(sound: Callable[..., None], **args: Any) -> None:
    sound(**args)
    args["out"][64:] = 0


FAULT = op_fault(
    "work_skipped_for_large_batches",
    op="projection",
    title="Rows above the sixth are not computed: the tests had no batch as large.",
    report="gpu-mode/reference-kernels#104",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    cells=(WIDE,),
    more=(),
)
