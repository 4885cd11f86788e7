"""What the reader of a coverage check should do where it did not pass: the command that fills its cell."""

from collections.abc import Mapping

from harness.domain.check import Check, Status

__all__ = ["next_steps"]


def next_steps(check: Check) -> Mapping[Status, str]:
    """A sentence by status; the command runs this check alone, at the tier that it needs."""
    command = f"`fasttrack run coverage --only {check.id} --tier {check.tier.value}`"
    cell = f" in {check.cell.label()}" if check.cell is not None else ""
    return {
        Status.FAIL: "read this check's steps and kernels in the report; the first row that disagrees names "
        "the step",
        Status.NO_EVIDENCE: f"make the optimised path run{cell} (the ledger holds the decline reasons), then "
        f"{command}",
        Status.INVALID: f"give both arms the same build and the same collectives, then {command}",
    }
