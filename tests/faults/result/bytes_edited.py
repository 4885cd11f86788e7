"""One byte of a finished bundle is changed."""

from pathlib import Path

from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene


def edit(folder: Path, is_repaired: bool) -> None:
    path = folder / "environment.json"
    content = path.read_bytes()
    path.write_bytes(content if is_repaired else content.replace(b"fasttrack", b"fasttrasc", 1))


FAULT = Fault(
    name="bytes_edited",
    title="One byte of a finished bundle is changed.",
    report="vllm-project/vllm#51798",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
