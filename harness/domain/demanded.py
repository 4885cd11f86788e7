"""Cells that a policy demands, out of what a claim covers. Pure."""

from collections.abc import Iterator
from itertools import product

from harness.domain.cell import Cell
from harness.domain.claim import Envelope
from harness.domain.policy import CellDemand

__all__ = ["demanded_cells"]


def demanded_cells(envelope: Envelope, arch: str, demand: CellDemand) -> Iterator[tuple[Cell, str]]:
    """(cell, feature or "") of every combination that the envelope admits."""
    axes = product(demand.batch, demand.context, demand.drafts, demand.tp, demand.dcp, demand.kv_dtype)
    for batch, context, drafts, tp, dcp, kv_dtype in axes:
        cell = Cell.model_validate(
            {
                "arch": arch, "batch": batch, "context": context, "drafts": drafts, "tp": tp, "dcp": dcp,
                "kv_dtype": kv_dtype, "phase": "verify" if drafts else "decode",
            }
        )  # fmt: skip
        if envelope.admits(cell):
            yield from ((cell, feature) for feature in demand.feature or ("",))
