"""Whether a plan asks everything that its claim and policy call for: plan again, from the same inputs."""

from harness.domain.check import Check
from harness.domain.plan import Plan
from harness.domain.stage import PlanRequest
from harness.engines.packs import harness_digest, load_pack, pack_digest
from harness.planner import CodeDigests, make_plan, plan_seed

__all__ = ["replan"]


def replan(plan: Plan) -> tuple[Check, ...] | None:
    """The checks that this harness plans for the stages of `plan`; None where the harness or the pack here is
    another version, which may plan otherwise. Raises `InputError` where the pack is not installed.
    """
    pack = load_pack(plan.pack)
    if plan.harness_digest != harness_digest() or plan.pack_digest != pack_digest(pack):
        return None
    request = PlanRequest(
        pack=pack, claim=plan.claim, policy=plan.policy, zones=plan.zones, rules=plan.rules,
        change=plan.change, machine=plan.machine, tier=plan.tier, is_full=plan.is_full,
        seed=plan_seed(plan.change.head, plan.nonce),
    )  # fmt: skip
    stages = tuple(dict.fromkeys(check.stage for check in plan.checks))
    return make_plan(request, CodeDigests(plan.harness_digest, plan.pack_digest), plan.nonce, stages).checks
