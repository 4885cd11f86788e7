"""The one finder of packaged data: policies, evals, sweeps, bundle schemas, report templates.

In an installed wheel the data folders lie in `harness/_data`; in a checkout at the repository's root.
"""

from pathlib import Path
from typing import Literal

from harness.domain.errors import InputError

__all__ = ["data_folder"]

DataKind = Literal["policies", "evals", "sweeps", "bundles"]


def data_folder(kind: DataKind) -> Path:
    """Folder of packaged data; raises `InputError` when neither the wheel nor the checkout has it."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "_data" / kind, package.parent / kind):
        if place.is_dir():
            return place
    raise InputError(
        f"the data folder {kind!r} is missing beside the harness package; reinstall fasttrack, or run it "
        "from a complete checkout"
    )
