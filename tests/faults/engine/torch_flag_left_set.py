"""The fast path lowers the precision of matrix products for the whole process."""

import torch

from tests.faults.planting import step_fault

BEFORE = torch.get_float32_matmul_precision()


def lower_for_the_step_only() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.set_float32_matmul_precision(BEFORE)


FAULT = step_fault(
    "torch_flag_left_set",
    title="The fast path lowers the precision of matrix products for the whole process.",
    report="facebookresearch/fairchem#2108",
    fault=lambda _: torch.set_float32_matmul_precision("medium"),
    repaired=lambda _: lower_for_the_step_only(),
    undo=lambda: torch.set_float32_matmul_precision(BEFORE),
)
