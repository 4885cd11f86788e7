"""The launch record leaves out the last block, so the timed launch does less than the tested one."""

from harness.domain.launch_record import KernelLaunch, LaunchRecord
from tests.faults.described import described_fault


def fault(record: LaunchRecord) -> LaunchRecord:
    (step,) = record.steps
    assert isinstance(step, KernelLaunch)
    return record.model_copy(update={"steps": (step.model_copy(update={"grid": (3, 1, 1)}),)})


FAULT = described_fault(
    "fewer_blocks_described",
    title="The launch record leaves out the last block, so the timed launch does less than the tested one.",
    report="gpu-mode/reference-kernels#104",
    record=fault,
)
