"""The change widens the tolerance of the test that it would fail."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="tolerance_widened",
    title="The change widens the tolerance of the test that it would fail.",
    report="vllm-project/vllm#39549",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="tests/k3_decode/test_rows.py",
        fault="atol=1e-2",
        repaired="atol=1e-4",
        instead_of="atol=1e-3",
    ),
)
