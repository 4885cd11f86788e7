"""The change skips the tests of what it changes."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="tests_switched_off",
    title="The change skips the tests of what it changes.",
    report="pytorch/pytorch#146554",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="tests/k3_decode/test_rows.py",
        fault="import pytest\n\n\n@pytest.mark.skip\ndef test_rows() -> None:",
        repaired="def test_rows() -> None:\n    assert 2 + 2 == 4",
        instead_of="def test_rows() -> None:",
    ),
)
