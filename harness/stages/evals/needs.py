"""Cells of the envelope in which an eval must have generated tokens, as the policy demands."""

from collections.abc import Iterator
from itertools import product

from harness.domain.cell import Cell
from harness.domain.cell_tokens import CellNeed, needs_text
from harness.domain.check import Check, StageName
from harness.domain.claim import Envelope
from harness.domain.policy import CellDemand
from harness.domain.stage import PlanRequest

__all__ = ["with_needs"]


def with_needs(request: PlanRequest, check: Check) -> Check:
    """The check with the demands that name its eval, or that name none."""
    proof = request.policy.proof(StageName.EVALS)
    demands = [d for d in proof.cells if not d.evals or check.subject in d.evals] if proof is not None else []
    needs = [need for d in demands for need in _needs(request.claim.envelope, request.machine.arch, d)]
    if not needs:
        return check
    return check.model_copy(update={"parameters": (*check.parameters, ("cells", needs_text(needs)))})


def _needs(envelope: Envelope, arch: str, demand: CellDemand) -> Iterator[CellNeed]:
    """Every combination that the claim covers; a batch is the upper edge of the bucket that it lies in."""
    for batch, context, drafts in product(demand.batch, demand.context, demand.drafts):
        cell = Cell.model_validate(
            {
                "arch": arch, "batch": batch, "context": context, "drafts": drafts,
                "phase": "verify" if drafts else "decode",
            }
        )  # fmt: skip
        if envelope.admits(cell):
            below = [edge for edge in envelope.batch_buckets if edge < batch]
            yield CellNeed(
                batch_min=max([*below, 0]) + 1,
                batch_max=batch,
                context=context,
                drafts=drafts,
                min_tokens=demand.min_tokens,
            )
