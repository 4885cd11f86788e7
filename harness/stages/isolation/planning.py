"""Which families of rules must judge this change: one check each."""

from typing import Final

from harness.domain.check import Check, StageName, Threshold
from harness.domain.policy import Proof
from harness.domain.stage import PlanRequest
from harness.stages.isolation.scan import DEFAULT_MAX_FILE_BYTES, PackPart, families_of

__all__ = ["FAMILIES", "plan"]

FAMILIES: Final = {
    "zones": "every changed file has a zone, and the claim's part stays in the zones it may touch",
    "reach": "no added line reaches from model code into what others share",
    "opt_in": "the optimised path is off unless the one declared switch selects it",
    "blast_radius": "no public signature changed, and the size of the change is known",
    "features": "no added line refuses or switches off a feature that the claim keeps",
    "hygiene": "the diff reads as it runs, holds no secrets, and leaves the tests as strict as they were",
}
"""What a PASS of each says, in order of judging."""
DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "blast_radius": {"max_added_lines": 50_000},
    "hygiene": {"max_file_bytes": DEFAULT_MAX_FILE_BYTES},
}
"""Thresholds of this stage: added lines outside tests and documentation, and bytes of one file."""


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """One check a family that judges some file of the change; zones are judged always."""
    proof = request.policy.proof(StageName.ISOLATION)
    if proof is None:
        return ()
    wanted = _families(request)
    cost_s = round(0.3 + 0.004 * len(request.change.files), 2)
    return tuple(_check(family, proof, cost_s) for family in FAMILIES if family in wanted)


def _families(request: PlanRequest) -> set[str]:
    part = PackPart(request.claim, request.pack.repository_prefix)
    kinds = {part.has(file) for file in request.change.files}
    return {"zones"}.union(*(families_of(request.policy, is_pack) for is_pack in kinds))


def _check(family: str, proof: Proof, cost_s: float) -> Check:
    overrides = dict(proof.thresholds)
    limits = {name: overrides.get(name, value) for name, value in DEFAULTS.get(family, {}).items()}
    return Check(
        id=f"{StageName.ISOLATION}/{family}",
        stage=StageName.ISOLATION,
        proves=FAMILIES[family],
        subject=family,
        thresholds=tuple(Threshold(name=name, value=value) for name, value in limits.items()),
        tier=proof.tier,
        is_required=proof.is_required,
        cost_s=cost_s,
    )
