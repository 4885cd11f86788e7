"""Outputs that a worker wrote to files: their digest, and how far they are from the truth."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.domain.errors import EvidenceError
from harness.domain.pack import OpContract
from harness.measure.tensor_files import ArgumentFiles, load_arguments
from harness.measure.tensors import exact_mismatches, token_errors, unwritten

__all__ = ["compare_saved", "outputs_digest"]


def outputs_digest(folder: Path, units: int) -> str:
    """sha256 over the outputs of a window, in the order in which they were made; of what is there."""
    total = hashlib.sha256()
    for number in range(units):
        place = folder / f"unit{number}"
        try:
            files = ArgumentFiles.from_json((place / "arguments.json").read_bytes())
            for tensor in files.tensors:
                total.update((place / f"{tensor.name}.bin").read_bytes())
        except (OSError, ValueError):
            return "incomplete"
    return total.hexdigest()


def compare_saved(
    contract: OpContract, units: Sequence[Path], truth: Sequence[Path]
) -> tuple[list[dict[str, Any]], str]:
    """Errors token by token, as rows for the bound; and what is plainly wrong, in words, if anything is."""
    rows: list[dict[str, Any]] = []
    for unit, reference in zip(units, truth, strict=True):
        got = load_arguments(unit, "cpu")
        want, stock = (load_arguments(reference / part, "cpu") for part in ("truth", "stock"))
        for parameter in contract.parameters:
            name = parameter.name
            if name not in want:
                continue
            if name not in got or got[name].shape != want[name].shape:
                raise EvidenceError(f"{unit}: {name} is missing, or of another shape than the truth")
            if unwritten(got[name]):
                return rows, f"{name} was not written in full"
            if parameter.is_exact:
                if wrong := exact_mismatches(got[name], want[name]):
                    return rows, f"{wrong} elements of {name} differ"
                continue
            dtype = got[name].dtype
            by_stock = token_errors(stock[name], want[name], dtype, parameter.token_axis)
            mine = token_errors(got[name], want[name], dtype, parameter.token_axis)
            rows += [
                {
                    "stock_l2": a.relative_l2, "optimised_l2": b.relative_l2, "stock_worst": a.worst,
                    "optimised_worst": b.worst, "ulp": a.ulp, "least": a.least,
                }
                for a, b in zip(by_stock, mine, strict=True)
            ]  # fmt: skip
    return rows, ""
