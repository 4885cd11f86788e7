"""A kernel writes to a buffer that every request shares as a weight."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "weight_written",
    title="A kernel writes to a buffer that every request shares as a weight.",
    report="vllm-project/vllm#53034",
    kernel="written_weight",
    roles=(("w", "weight"), ("out", "output")),
)
