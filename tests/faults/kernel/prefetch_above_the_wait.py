"""An activation is prefetched above the wait, so the old value may be what is read."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "prefetch_above_the_wait",
    title="An activation is prefetched above the wait, so the old value may be what is read.",
    report="NVIDIA/cutlass#3279",
    kernel="early_prefetch",
    roles=(("x", "activation"), ("out", "output")),
)
