"""Which proofs a policy demands of a claim: one for each stage, and where it matters for each
architecture.
"""

from typing import NamedTuple

from harness.domain.cell import Arch
from harness.domain.check import Check, StageName
from harness.domain.claim import Claim
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.domain.policy import Policy

__all__ = ["Demand", "architecture_of", "demands", "out_of_reach"]

RUN_STAGES = (StageName.KERNELS, StageName.COVERAGE, StageName.EVALS, StageName.SWEEP)
"""Stages whose evidence speaks of the architecture that it ran on."""


class Demand(NamedTuple):
    """Evidence of one stage, on one architecture where that matters, at a tier."""

    stage: StageName
    arch: Arch | None
    tier: Tier
    subjects: tuple[str, ...]


def demands(policy: Policy, claim: Claim) -> tuple[Demand, ...]:
    """Every required proof, in stage order.

    Isolation speaks of the whole change. Audit covers every architecture of the claim that has compiled
    kernels. The stages that run something cover every dispatched architecture: the CPU's evidence is of
    tier smoke by nature, a GPU's of the proof's tier, and a proof at tier smoke asks for no GPU. Subjects
    are asked for at the proof's own tier.
    """
    found = []
    for stage in StageName:
        proof = policy.proof(stage)
        if proof is None or not proof.is_required:
            continue
        for arch in _architectures(stage, proof.tier, claim):
            tier = Tier.SMOKE if arch == "cpu" else proof.tier
            found.append(Demand(stage, arch, tier, proof.subjects if tier is proof.tier else ()))
    return tuple(found)


def out_of_reach(plan: Plan) -> tuple[Demand, ...]:
    """Proofs of the plan's stages that no run on its machine and at its tier can give."""
    planned = {check.stage for check in plan.checks}
    return tuple(
        demand
        for demand in demands(plan.policy, plan.claim)
        if demand.stage in planned
        and (
            demand.tier.strength > plan.tier.strength
            or (demand.stage in RUN_STAGES and demand.arch not in (None, plan.machine.arch))
        )
    )


def architecture_of(check: Check, plan: Plan) -> Arch | None:
    """The architecture that a check speaks of; None where its stage knows none."""
    if check.stage is StageName.ISOLATION:
        return None
    if check.cell is not None:
        return check.cell.arch
    if check.stage is StageName.AUDIT:
        words = set(check.id.replace("/", ".").split(".")) | {str(v) for _, v in check.parameters}
        return next((a.arch for a in plan.claim.envelope.architectures if a.arch in words), None)
    return plan.machine.arch


def _architectures(stage: StageName, tier: Tier, claim: Claim) -> tuple[Arch | None, ...]:
    named = claim.envelope.architectures
    if stage is StageName.AUDIT:
        return tuple(a.arch for a in named if a.arch != "cpu")
    if stage in RUN_STAGES:
        dispatched: list[Arch] = [a.arch for a in named if a.level == "dispatched"]
        if tier is Tier.SMOKE and "cpu" in dispatched:
            return ("cpu",)
        return tuple(dispatched)
    return (None,)
