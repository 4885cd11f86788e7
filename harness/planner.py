"""policy x claim x change x machine: decide what to check, before anything runs.

`make_plan` is pure but for the digests it is handed: the same request gives the same plan, whatever ran
before. Which checks exist is each stage's own business (`stages/<name>.plan`); this module asks the stages in
order, applies the policy's word on what is required and at which tier, and marks what this machine cannot
run.
"""

import hashlib
import re
import secrets
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness import __version__
from harness.domain.check import Check, StageName
from harness.domain.claim import Claim
from harness.domain.errors import InputError
from harness.domain.machine import Machine, Tier
from harness.domain.pack import Pack
from harness.domain.plan import Plan, is_within
from harness.domain.stage import PlanRequest
from harness.stages import stage_of

__all__ = [
    "SHARES_CORES", "SIDE_BY_SIDE", "CheckGroup", "CodeDigests", "StageCost", "claim_or_best",
    "estimate_costs", "gpus_needed", "make_nonce", "make_plan", "plan_seed", "repeat_plan", "request_again",
    "resolve_tier", "skipped_by_reason", "stated_once",
]  # fmt: skip

SIDE_BY_SIDE = 2
"""Children at a time, each with one thread: what a machine of two cores carries."""
SHARES_CORES = frozenset({StageName.AUDIT, StageName.KERNELS, StageName.COVERAGE, StageName.EVALS})
"""Stages whose checks run side by side; times want quiet."""


@dataclass(frozen=True, slots=True)
class CodeDigests:
    """Which judge and which candidate, as hex sha256 of their files."""

    harness: str
    pack: str


class StageCost(NamedTuple):
    """What a stage will take here."""

    stage: StageName
    checks: int
    """Checks that will run."""
    unavailable: int
    """Checks that cannot run here."""
    wanted: Tier
    """Weakest tier whose evidence the policy counts."""
    seconds: float
    """Estimated from start to end, checks side by side where the stage allows it."""


class CheckGroup(NamedTuple):
    """Checks of which one sentence is true: what they prove, or why they cannot run here."""

    words: str
    checks: tuple[Check, ...]


def make_nonce() -> str:
    """16 hex digits that nobody could know when the kernel was written."""
    return secrets.token_hex(8)


def plan_seed(head_sha: str, nonce: str) -> int:
    """The 31-bit seed from which every check derives its own."""
    return int.from_bytes(hashlib.sha256(f"{head_sha}:{nonce}".encode()).digest()[:4]) >> 1


def resolve_tier(asked: str, machine: Machine, claim: Claim) -> Tier:
    """The tier of this run; `auto` is the best the machine can give, short of the claimed size.

    Raises `InputError` when the machine cannot reach the tier that was asked for.
    """
    if asked == "auto":
        return machine.best_tier
    if asked not in list(Tier):
        raise InputError(f"--tier {asked!r} is no tier; the tiers are auto, {', '.join(Tier)}")
    tier = Tier(asked)
    needed = {Tier.SMOKE: 0, Tier.RANK: 1, Tier.NODE: 2, Tier.CLAIM: max(claim.envelope.tp)}[tier]
    usable = sum(gpu.arch is not None for gpu in machine.gpus)
    if usable < needed:
        best = claim_or_best(machine, claim).value
        raise InputError(
            f"tier {tier.value} needs {_gpus(needed)} of a supported kind in one machine, and this one has "
            f"{usable or 'none'} ({len(machine.gpus)} seen): run here with --tier {best}, or plan here with "
            "`fasttrack plan --machine FILE --save PLAN` and run the plan on such a machine with `fasttrack "
            "worker PLAN`"
        )
    return tier


def claim_or_best(machine: Machine, claim: Claim) -> Tier:
    """The strongest tier that a machine's evidence can have: `claim` needs as many GPUs as the claim divides
    a model over.
    """
    usable = sum(gpu.arch is not None for gpu in machine.gpus)
    return Tier.CLAIM if usable and usable >= max(claim.envelope.tp) else machine.best_tier


def _gpus(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"


def make_plan(
    request: PlanRequest,
    digests: CodeDigests,
    nonce: str,
    stages: Sequence[StageName] = tuple(StageName),
    only: Sequence[str] = (),
) -> Plan:
    """Every check that the policy demands of this claim and change, cheapest stage first.

    `stages` narrows the plan to some stages, `only` to checks that any of its words names (`is_within`); the
    gate still demands the others.
    """
    checks: list[Check] = []
    for name in StageName:
        if name in stages and request.policy.proof(name) is not None:
            checks += [_under_policy(check, request) for check in stage_of(name).plan(request)]
    checks = [c for c in checks if is_within(c, only)]
    if not checks:
        words = f" and no check that {', '.join(only)[:200]} names" if only else ""
        raise InputError(
            f"policy {request.policy.name!r} and stages {', '.join(stages) or 'none'} leave nothing to "
            f"check{words}; choose stages that the policy has a proof for, and words that `fasttrack plan "
            "--all` shows: check ids, ops, subjects or cells"
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
        only=tuple(only),
        nonce=nonce,
        checks=tuple(checks),
    )


def request_again(plan: Plan, pack: Pack, machine: Machine) -> PlanRequest:
    """The request that a plan was made from, for a pack and a machine that are here."""
    return PlanRequest(
        pack=pack, claim=plan.claim, policy=plan.policy, zones=plan.zones, rules=plan.rules,
        change=plan.change, machine=machine, tier=plan.tier, is_full=plan.is_full,
        seed=plan_seed(plan.change.head, plan.nonce),
    )  # fmt: skip


def repeat_plan(
    first: Plan, bundle: str, request: PlanRequest, digests: CodeDigests, only: Sequence[str]
) -> Plan:
    """The plan of a run that repeats `first`, the plan of the bundle with that digest: the same questions
    with the same seeds, asked of the machine in `request`.
    """
    stages = tuple(dict.fromkeys(check.stage for check in first.checks))
    made = make_plan(request, digests, first.nonce, stages, only or first.only)
    if first.only and any(not first.holds(check) for check in made.checks):
        # What the first run left out cannot be repeated.
        kept = tuple(check.id for check in made.checks if first.holds(check))
        made = make_plan(request, digests, first.nonce, stages, kept)
    # The change lies in the plan without its lines, so its digest cannot be made again.
    return made.model_copy(update={"change_digest": first.change_digest, "replicates": bundle})


def estimate_costs(plan: Plan) -> tuple[StageCost, ...]:
    """What each stage takes, in order; stages without checks are left out."""
    rows = []
    for name in StageName:
        checks = plan.of_stage(name)
        if checks:
            costs = [check.cost_s for check in checks if check.unavailable is None]
            lanes = SIDE_BY_SIDE if name in SHARES_CORES else 1
            seconds = max(sum(costs) / lanes, max(costs, default=0.0))
            proof = plan.policy.proof(name)
            wanted = plan.tier if proof is None else proof.tier
            rows.append(StageCost(name, len(costs), len(checks) - len(costs), wanted, seconds))
    return tuple(rows)


def gpus_needed(plan: Plan, check: Check) -> int:
    """GPUs of one node that a check of this plan takes: none on a machine without, one for a rank, and for
    real collectives as many as its cell divides a model over, two at least.
    """
    usable = sum(gpu.arch is not None for gpu in plan.machine.gpus)
    if not usable:
        return 0
    if check.tier.strength < Tier.NODE.strength:
        return 1
    return min(usable, max(2, 1 if check.cell is None else check.cell.tp * check.cell.dcp))


def stated_once(plan: Plan) -> tuple[CheckGroup, ...]:
    """Checks that will run, those of one stage that prove the same together, in plan order."""
    able = [check for check in plan.checks if check.unavailable is None]
    words = [_of_each_op(check) for check in able]
    return _grouped(able, [(c.stage, said) for c, said in zip(able, words, strict=True)], words)


def skipped_by_reason(plan: Plan) -> tuple[CheckGroup, ...]:
    """Checks that cannot run here by reason, the most frequent reason first."""
    gone = [check for check in plan.checks if check.unavailable is not None]
    reasons = [check.unavailable or "" for check in gone]
    return tuple(sorted(_grouped(gone, reasons, reasons), key=lambda group: -len(group.checks)))


def _of_each_op(check: Check) -> str:
    """What a check proves, said of each op where it is said of one."""
    return (
        check.proves if check.op is None else re.sub(rf"\b{re.escape(check.op)}\b", "each op", check.proves)
    )


def _grouped(
    checks: Iterable[Check], keys: Sequence[Hashable], words: Sequence[str]
) -> tuple[CheckGroup, ...]:
    """Checks of equal keys together, under the words of the first."""
    found: dict[Hashable, CheckGroup] = {}
    for check, key, sentence in zip(checks, keys, words, strict=True):
        known = found.get(key, CheckGroup(sentence, ()))
        found[key] = CheckGroup(known.words, (*known.checks, check))
    return tuple(found.values())


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
