"""An output is written above the wait, while the kernel before may still read it."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "store_above_the_wait",
    title="An output is written above the wait, while the kernel before may still read it.",
    report="flashinfer-ai/flashinfer#4685",
    kernel="early_store",
    roles=(("x", "activation"), ("out", "output")),
)
