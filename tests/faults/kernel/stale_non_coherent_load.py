"""A buffer that the launch also writes is read through the non-coherent cache."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "stale_non_coherent_load",
    title="A buffer that the launch also writes is read through the non-coherent cache.",
    report="NVIDIA/cutlass#2962",
    kernel="non_coherent_ping_pong",
    roles=(("first", "state"), ("second", "state")),
)
