"""An activation is read above the wait for the kernel that writes it."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "load_above_the_wait",
    title="An activation is read above the wait for the kernel that writes it.",
    report="NVIDIA/cutlass#3279",
    kernel="hoisted_load",
    roles=(("x", "activation"), ("out", "output")),
)
