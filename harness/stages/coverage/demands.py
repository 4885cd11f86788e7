"""Cells that the policy demands: each becomes a check, or raises what the check of its cell must show."""

from dataclasses import replace

from harness.domain.cell import Cell
from harness.domain.check import StageName
from harness.domain.demanded import demanded_cells
from harness.domain.pack import Pack
from harness.domain.stage import PlanRequest
from harness.stages.coverage.wanted import Wanted, steps_of

__all__ = ["model_of", "unreached", "with_demands"]

CPU_CONTEXT = 16384
"""Longest context that a path check fills on a CPU."""


def with_demands(request: PlanRequest, wanted: list[Wanted]) -> list[Wanted]:
    """The checks that the claim derives and, behind them, one for each demanded cell that none of them is
    about; a demand raises what the cell of such a check must hold.
    """
    proof = request.policy.proof(StageName.COVERAGE)
    places = {(w.kind, w.name): n for n, w in enumerate(wanted)}
    for demand in proof.cells if proof is not None else ():
        for cell, feature in demanded_cells(request.claim.envelope, request.machine.arch, demand):
            kind = "feature" if feature else "path"
            name = f"{feature}.{cell.label()}" if feature else cell.label()
            found = places.setdefault((kind, name), len(wanted))
            if found == len(wanted):
                proves = (
                    "a cell that the policy demands is not empty: the optimised path generated tokens there"
                )
                wanted.append(
                    Wanted(
                        kind, name, cell, proves, subject=feature or name,
                        unavailable=unreached(cell, request.pack), more=(("is_drawn", False),),
                        model=model_of(cell, request.pack),
                    )
                )  # fmt: skip
            least = max(demand.min_tokens, wanted[found].min_tokens or 0)
            steps = max(steps_of(wanted[found]), -(-least // cell.rows))
            more = {"min_tokens": least, "steps": steps, "is_demanded": True}
            wanted[found] = replace(wanted[found], **more)  # type: ignore[arg-type]  # each has its field's type
    return wanted


def model_of(cell: Cell, pack: Pack) -> str:
    """The small model that as many ranks can share as the cell has; empty where there is none, or for one."""
    return "" if cell.tp == 1 else pack.model_of_ranks(cell.tp) or ""


def unreached(cell: Cell, pack: Pack) -> str | None:
    """Why this machine's in-process engine cannot serve a cell; None where it can."""
    if cell.arch == "cpu" and cell.context > CPU_CONTEXT:
        return f"a CPU takes too long over a context of {cell.context}; needs a GPU"
    if cell.tp > 1 and not model_of(cell, pack):
        return f"the pack has no small model that {cell.tp} ranks of one process can share"
    if cell.dcp > 1:
        return f"a context divided over {cell.dcp} ranks needs an engine that divides it"
    return None
