"""A JSON file says one thing twice, so that two readers see two values."""

from pathlib import Path

from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.evidence.tampering import rehash


def edit(folder: Path, is_repaired: bool) -> None:
    path = folder / "environment.json"
    if not is_repaired:
        path.write_bytes(path.read_bytes().replace(b"{", b'{"command":[],', 1))
    rehash(folder)


FAULT = Fault(
    name="doubled_key",
    title="A JSON file says one thing twice, so that two readers see two values.",
    report="openai/mrcr (dataset card, 5 December 2025)",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
