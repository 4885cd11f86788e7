"""A file of the bundle is a link to a file of the reader's machine."""

from pathlib import Path

from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene


def edit(folder: Path, is_repaired: bool) -> None:
    if not is_repaired:
        path = folder / "environment.json"
        path.unlink()
        path.symlink_to("/etc/hostname")


FAULT = Fault(
    name="link_out_of_the_bundle",
    title="A file of the bundle is a link to a file of the reader's machine.",
    report="JAXBench (AI-Hypercomputer/accelerator-agents#50)",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
