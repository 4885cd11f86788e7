"""Which coverage checks a claim calls for: every batch bucket, phase and op, and what must decline."""

from collections.abc import Iterator

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName, Threshold
from harness.domain.claim import Envelope
from harness.domain.machine import Tier
from harness.domain.record import Scalar
from harness.domain.stage import PlanRequest

__all__ = ["path_cells", "plan"]

SHORT_CONTEXT = 24
"""Tokens before the first covered step: enough for conv windows, two MLA chunks and no more."""
COST_PER_ROW_S = 0.02
"""Measured on 2 cores with the nano model: one row of one step, all arms of a check."""
CLEAN_KL_MARGIN = 4.0
"""A poisoned op counts as noticed when the median KL is this many times the clean arms' median. Between seeds
the nano model's clean median moves by less than 2."""
POISON_SCALE = 2.0
"""Factor on every other output value of a poisoned op."""


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """Path checks over bucket edges and phases, declines, poisons, transitions and run-time isolation."""
    return tuple(_all_checks(request))


def path_cells(envelope: Envelope, arch: str) -> tuple[Cell, ...]:
    """Bucket edges in decode, and verify at fewest and most drafts where the joint limit admits a batch."""
    decode = [
        Cell.model_validate({"arch": arch, "batch": edge, "context": SHORT_CONTEXT})
        for edge in sorted({envelope.batch.min, *envelope.batch_buckets})
    ]
    verify = []
    for drafts in sorted({max(1, envelope.drafts.min), envelope.drafts.max}):
        if drafts in envelope.drafts and "verify" in envelope.phases:
            for batch in sorted({envelope.batch.min, envelope.max_rows_per_step // (drafts + 1)}):
                cell = {
                    "arch": arch,
                    "batch": batch,
                    "drafts": drafts,
                    "phase": "verify",
                    "context": SHORT_CONTEXT,
                }
                verify.append(Cell.model_validate(cell))
    return tuple(cell for cell in decode + verify if envelope.admits(cell))


def _all_checks(request: PlanRequest) -> Iterator[Check]:
    envelope, arch = request.claim.envelope, request.machine.arch
    missing = None if envelope.level(arch) == "dispatched" else f"the claim does not dispatch on {arch}"
    for cell in path_cells(envelope, arch):
        yield _check(
            request, "path", cell.label(), cell, missing,
            "inside the envelope the optimised path runs in this cell, by ledger, counters and manifest "
            "alike",
        )  # fmt: skip
    for reason, cell in _decline_cells(envelope, arch):
        yield _check(
            request, "decline", reason, cell, missing,
            "outside the envelope the step is declined with a reason code and answers exactly as stock does",
        )  # fmt: skip
    base = Cell.model_validate({"arch": arch, "batch": 2, "context": SHORT_CONTEXT})
    for op in request.pack.ops():
        yield _check(
            request, "poison", op.name, base, missing,
            "making this op visibly wrong changes the drift eval, so the eval covers it", op=op.name,
        )  # fmt: skip
    yield _check(
        request, "transition", "optimised_stock_optimised", base, missing,
        "switching between the paths inside a request gives what never switching gives",
    )  # fmt: skip
    yield _check(
        request, "state", "declared_writes", base, missing,
        "a decode step writes only the state that the claim declares, and leaves the process as it was",
    )  # fmt: skip


def _decline_cells(envelope: Envelope, arch: str) -> Iterator[tuple[str, Cell]]:
    """Cells just outside the envelope, named by the side that they leave it on."""
    over_batch = {"arch": arch, "batch": envelope.batch.max + 1, "context": SHORT_CONTEXT}
    yield "batch_above_max", Cell.model_validate(over_batch)
    drafts = envelope.drafts.max
    batch = envelope.max_rows_per_step // (drafts + 1) + 1
    if drafts > 0 and batch in envelope.batch and "verify" in envelope.phases:
        over_rows = {
            "arch": arch,
            "batch": batch,
            "drafts": drafts,
            "phase": "verify",
            "context": SHORT_CONTEXT,
        }
        yield "rows_above_max", Cell.model_validate(over_rows)
    yield (
        "prefill",
        Cell.model_validate({"arch": arch, "batch": 2, "phase": "prefill", "context": SHORT_CONTEXT}),
    )


def _check(
    request: PlanRequest,
    kind: str,
    name: str,
    cell: Cell,
    unavailable: str | None,
    proves: str,
    op: str | None = None,
) -> Check:
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("kind", kind), ("model", request.pack.smoke_model), ("seed", request.seed),
        ("steps", 6 if cell.batch <= 16 else 3),
        ("poison_scale", POISON_SCALE),
        ("implementation", "cpu" if cell.arch == "cpu" else "cute"),
    )  # fmt: skip
    proof = request.policy.proof(StageName.COVERAGE)
    overrides = dict(proof.thresholds) if proof is not None else {}
    limits = {
        "min_path_share": request.policy.min_path_share,
        "clean_kl_margin": CLEAN_KL_MARGIN,
        **overrides,
    }
    return Check(
        id=f"coverage/{kind}/{name}",
        stage=StageName.COVERAGE,
        proves=proves,
        cell=cell,
        op=op,
        subject=name,
        thresholds=tuple(Threshold(name=key, value=value) for key, value in sorted(limits.items())),
        parameters=parameters,
        tier=Tier.SMOKE if cell.arch == "cpu" else Tier.RANK,
        cost_s=0.3 + COST_PER_ROW_S * cell.rows * 2,
        unavailable=unavailable,
    )
