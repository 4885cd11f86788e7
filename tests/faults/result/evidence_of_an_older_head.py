"""The pull request has moved on, and the bundle is of an older commit."""

from pathlib import Path

from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene


def edit(folder: Path, is_repaired: bool) -> None:
    """The bundle itself is sound: what is wrong is the head that it is handed in for."""


FAULT = Fault(
    name="evidence_of_an_older_head",
    title="The pull request has moved on, and the bundle is of an older commit.",
    report="vllm-project/vllm#51798",
    target="result",
    expected="bundle",
    scene=BundleScene(edit, head="ffffffffffffffffffffffffffffffffffffffff"),
)
