"""Only one side of a branch waits for the kernel before."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "wait_on_one_side",
    title="Only one side of a branch waits for the kernel before.",
    report="flashinfer-ai/flashinfer#4685",
    kernel="one_sided_wait",
    roles=(("x", "activation"), ("out", "output")),
)
