"""The repository's own fault suite: one fault a file, found by walking this folder."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from harness.faults.fault import Fault

__all__ = ["all_faults"]

FOLDER = Path(__file__).resolve().parent


def all_faults() -> Iterator[Fault]:
    """Every `FAULT` below this folder; entry point `fasttrack.faults`."""
    for path in sorted(FOLDER.glob("*/*.py")):
        if path.stem != "__init__" and not path.stem.startswith(("test_", "_")):
            fault: Fault = import_module(f"tests.faults.{path.parent.name}.{path.stem}").FAULT
            if fault.name != path.stem:
                raise ValueError(f"{path.name} holds the fault {fault.name!r}: a fault has its file's name")
            yield fault
