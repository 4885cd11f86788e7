"""A kernel writes to a weight, so that later launches, and whoever checks them, read another one."""

from tests.faults.described import described_fault

STORE = "  st.global.f32 [%rd9], %f3;\n  st.global.f32 [%rd8], %f3;\n"


def fault(text: str) -> str:
    return text.replace("  st.global.f32 [%rd9], %f3;\n", STORE, 1)


FAULT = described_fault(
    "weight_written_by_the_kernel",
    title="A kernel writes to a weight, so that later launches, and whoever checks them, read another one.",
    report="ScalingIntelligence/KernelBench#82",
    binary=fault,
)
