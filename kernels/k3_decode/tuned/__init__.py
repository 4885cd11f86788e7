"""Choices of kernels that were measured: tables by architecture, and how a launch looks its own up.

A table (`sm_90a.json`, `cpu.json`) is written by `fasttrack tune` and holds only configurations that passed
the op's tests. Kernels ask `choice`; where it has none they take what is built in. Invariant: a choice
changes speed only, never what is computed beyond the order of sums.
"""

from k3_decode.tuned.lookup import (
    Choice,
    TableError,
    choice,
    configured,
    read_table,
    source_of,
    table_file,
    tables,
)

__all__ = [
    "Choice", "TableError", "choice", "configured", "read_table", "source_of", "table_file", "tables",
]  # fmt: skip
