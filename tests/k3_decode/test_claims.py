"""Claims beside the pack's own: every one is planned by the harness as it is, and says what it would need."""

from functools import cache
from pathlib import Path

import pytest

from harness.documents import load_claim, load_policy_set
from harness.domain.check import StageName
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.domain.stage import PlanRequest
from harness.engines.packs import load_pack
from harness.planner import CodeDigests, make_plan
from tests.fakes.requests import CHANGE, MACHINE

FOLDER = Path(__file__).parents[2] / "kernels" / "k3_decode" / "claims"
CLAIMS = sorted(FOLDER.glob("*.yaml"))


@cache
def planned(path: Path) -> Plan:
    """Under the strict policy, for a machine without a GPU."""
    policy, zones, rules = load_policy_set("fast_track")
    request = PlanRequest(
        pack=load_pack("k3_decode"), claim=load_claim(path), policy=policy, zones=zones, rules=rules,
        change=CHANGE, machine=MACHINE, tier=Tier.SMOKE, is_full=False, seed=7,
    )  # fmt: skip
    return make_plan(request, CodeDigests("0" * 64, "1" * 64), "0" * 16, tuple(StageName))


def test_the_announced_systems_have_templates() -> None:
    assert [path.stem for path in CLAIMS] == [
        "deepseek_v41_flash", "glm_53", "h200_rank", "muse_spark", "vllm_k3_gb300",
    ]  # fmt: skip


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.stem)
def test_a_claim_plans_its_evidence_and_says_what_cannot_run_here(path: Path) -> None:
    plan = planned(path)
    dispatched = [a.arch for a in plan.claim.envelope.architectures if a.level == "dispatched"]
    stages = {check.stage for check in plan.checks}
    assert stages | {StageName.SWEEP} == set(StageName)  # sweeps are planned where the claim dispatches
    assert sum(check.cost_s for check in plan.checks) > 600
    missing = [str(check.unavailable) for check in plan.checks if check.unavailable]
    assert any(f"needs a machine with {dispatched[0]}; this one has cpu" in why for why in missing)
    assert "the claim does not dispatch on cpu" in missing


def test_a_template_of_one_user_asks_for_no_larger_batch() -> None:
    checks = planned(FOLDER / "muse_spark.yaml").checks
    own = [c.cell for c in checks if c.stage is StageName.KERNELS and c.cell is not None]
    assert {cell.batch for cell in own if cell.arch == "sm_103a"} == {1}
