"""Whether an op replaced anything of the process that tries it: functions of checker or framework, flags.

A candidate runs where its errors are computed, and might make them small there. Row (arm, name) of table
`process`: `optimised` for what the op replaced, `planted` for a function that is replaced here, as control.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from harness.measure import tensors
from harness.measure.process_state import replaced_names, snapshot
from harness.measure.trial import Rows

__all__ = ["PLANTED", "watched_process"]

PLANTED = "module:harness.measure.tensors.checksum"
"""What the control replaces."""


@contextmanager
def watched_process(rows: Rows) -> Iterator[None]:
    """The op is tried inside; what it replaced comes out as rows."""
    before = snapshot()
    yield
    after = snapshot()
    for name in replaced_names(before, after):
        rows.add("process", "optimised", name)
    sound = tensors.checksum
    tensors.checksum = lambda tensors: str(len(tensors))
    try:
        seen = replaced_names(after, snapshot())
    finally:
        tensors.checksum = sound
    for name in seen:
        rows.add("process", "planted", name)
