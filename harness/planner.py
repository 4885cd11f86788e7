"""policy x claim x change x machine: decide what to check, before anything runs.

`make_plan` is pure but for the digests it is handed: the same request gives the same plan, whatever ran
before. Which checks exist is each stage's own business (`stages/<name>.plan`); this module asks the stages in
order, applies the policy's word on what is required and at which tier, and marks what this machine cannot
run.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness import __version__
from harness.domain.check import Check, StageName
from harness.domain.errors import InputError
from harness.domain.machine import Machine, Tier
from harness.domain.plan import Plan
from harness.domain.stage import PlanRequest
from harness.stages import stage_of

__all__ = [
    "CodeDigests",
    "StageCost",
    "estimate_costs",
    "make_nonce",
    "make_plan",
    "plan_seed",
    "resolve_tier",
]


@dataclass(frozen=True, slots=True)
class CodeDigests:
    """Which judge and which candidate, as hex sha256 of their files."""

    harness: str
    pack: str


class StageCost(NamedTuple):
    """What a stage will take here."""

    stage: StageName
    checks: int
    unavailable: int
    seconds: float


def make_nonce() -> str:
    """16 hex digits that nobody could know when the kernel was written."""
    return secrets.token_hex(8)


def plan_seed(head_sha: str, nonce: str) -> int:
    """The 31-bit seed from which every check derives its own."""
    return int.from_bytes(hashlib.sha256(f"{head_sha}:{nonce}".encode()).digest()[:4]) >> 1


def resolve_tier(asked: str, machine: Machine) -> Tier:
    """The tier of this run; `auto` is the best the machine can give.

    Raises `InputError` when the machine cannot reach the tier that was asked for.
    """
    if asked == "auto":
        return machine.best_tier
    tier = Tier(asked)
    if tier.strength > max(machine.best_tier.strength, Tier.CLAIM.strength if machine.gpus else 0):
        raise InputError(
            f"tier {asked!r} needs a supported GPU and this machine has none ({len(machine.gpus)} GPUs "
            "seen); run "
            "with --tier smoke, or plan here with `fasttrack plan --machine FILE --save PLAN` and run the "
            "plan on "
            "a GPU machine with `fasttrack worker PLAN`"
        )
    return tier


def make_plan(
    request: PlanRequest,
    digests: CodeDigests,
    nonce: str,
    stages: Sequence[StageName] = tuple(StageName),
    subjects: Sequence[str] = (),
) -> Plan:
    """Every check that the policy demands of this claim and change, cheapest stage first.

    `stages` narrows the plan to some stages, `subjects` to checks about some subjects or ops; the gate still
    demands the others.
    """
    checks: list[Check] = []
    for name in StageName:
        if name in stages and request.policy.proof(name) is not None:
            checks += [_under_policy(check, request) for check in stage_of(name).plan(request)]
    checks = [c for c in checks if not subjects or {c.subject, c.op}.intersection(subjects)]
    if not checks:
        raise InputError(
            f"policy {request.policy.name!r} and stages {', '.join(stages) or 'none'} leave nothing to "
            "check; "
            "choose stages that the policy has a proof for"
        )
    return Plan(
        harness_version=__version__,
        harness_digest=digests.harness,
        pack=request.pack.name,
        pack_digest=digests.pack,
        claim=request.claim,
        policy=request.policy,
        zones=request.zones,
        rules=request.rules,
        change=request.change.without_hunks(),
        change_digest=request.change.digest(),
        machine=request.machine,
        tier=request.tier,
        is_full=request.is_full,
        nonce=nonce,
        checks=tuple(checks),
    )


def estimate_costs(plan: Plan) -> tuple[StageCost, ...]:
    """Checks and estimated seconds by stage, in order; stages without checks are left out."""
    rows = []
    for name in StageName:
        checks = plan.of_stage(name)
        if checks:
            gone = sum(check.unavailable is not None for check in checks)
            seconds = sum(check.cost_s for check in checks if check.unavailable is None)
            rows.append(StageCost(name, len(checks), gone, seconds))
    return tuple(rows)


def _under_policy(check: Check, request: PlanRequest) -> Check:
    """The check as the policy wants it: required or not, and skipped where this run's tier is too weak."""
    proof = request.policy.proof(check.stage)
    if proof is None:
        raise AssertionError(f"{check.id} was planned for a stage without a proof")
    unavailable = check.unavailable
    if unavailable is None and check.tier.strength > request.tier.strength:
        unavailable = f"needs tier {check.tier.value}, and this run is at tier {request.tier.value}"
    return check.model_copy(
        update={"is_required": check.is_required and proof.is_required, "unavailable": unavailable}
    )
