"""The fast path replaces a function of torch for the whole process."""

import torch

from tests.faults.planting import step_fault

BEFORE = torch.nn.functional.silu


def patch(is_left: bool) -> None:
    torch.nn.functional.silu = lambda x, inplace=False: BEFORE(x, inplace)
    if not is_left:
        undo()


def undo() -> None:
    torch.nn.functional.silu = BEFORE


FAULT = step_fault(
    "torch_function_patched",
    title="The fast path replaces a function of torch for the whole process.",
    report="gpu-mode/reference-kernels#162",
    fault=lambda _: patch(is_left=True),
    repaired=lambda _: patch(is_left=False),
    undo=undo,
)
