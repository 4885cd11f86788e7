"""The candidate replaces the function that compares it with the oracle."""

from harness.measure import tensors
from tests.faults.planting import step_fault

BEFORE = tensors.token_errors


def patch(is_left: bool) -> None:
    tensors.token_errors = lambda *_, **__: ()
    if not is_left:
        undo()


def undo() -> None:
    tensors.token_errors = BEFORE


FAULT = step_fault(
    "checker_patched",
    title="The candidate replaces the function that compares it with the oracle.",
    report="ScalingIntelligence/KernelBench#82",
    fault=lambda _: patch(is_left=True),
    repaired=lambda _: patch(is_left=False),
    undo=undo,
)
