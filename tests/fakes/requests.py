"""Plan requests, contexts and single-stage runs for tests, on the fake pack."""

from pathlib import Path

from harness.documents import load_claim
from harness.domain.change import Change
from harness.domain.check import Check, Outcome, StageName
from harness.domain.machine import Machine, Tier
from harness.domain.policy import Policy, Proof, Zone, ZoneMap
from harness.domain.stage import PlanRequest, StageContext
from harness.stages import stage_of
from tests.fakes.pack import FakePack, Faults

MACHINE = Machine(platform="Linux-x86_64", cpu_model="test", cpu_count=2, memory_bytes=2**33, python="3.11.0")
POLICY = Policy(
    name="test", summary="every stage at the smoke tier", zone_map="test",
    proofs=tuple(Proof(stage=stage) for stage in StageName),
)  # fmt: skip
ZONES = ZoneMap(name="test", repository="test", zones=(Zone(name="model_code", globs=("**",), why="all"),))
CHANGE = Change(repository="test", base="0" * 40, head="1" * 40)


def plan_request(pack: FakePack | None = None, policy: Policy = POLICY, seed: int = 7) -> PlanRequest:
    """A request at the smoke tier over the fake pack."""
    pack = pack or FakePack()
    return PlanRequest(
        pack=pack, claim=load_claim(pack.claim_file()), policy=policy, zones=ZONES, rules=(), change=CHANGE,
        machine=MACHINE, tier=Tier.SMOKE, is_full=False, seed=seed,
    )  # fmt: skip


def stage_context(pack: FakePack, folder: Path) -> StageContext:
    """A context whose folders lie under `folder`."""
    for name in ("cache", "logs", "ledger"):
        (folder / name).mkdir(exist_ok=True)
    request = plan_request(pack)
    return StageContext(
        pack=pack, claim=request.claim, policy=request.policy, zones=ZONES, rules=(), change=CHANGE,
        machine=MACHINE, tier=Tier.SMOKE, tree=None, cache=folder / "cache",
        logs=folder / "logs", ledger=folder / "ledger",
        progress=lambda _: None,
    )  # fmt: skip


def planned(stage: StageName, id_part: str, pack: FakePack | None = None) -> Check:
    """The first check of a stage whose id holds `id_part`."""
    return next(check for check in stage_of(stage).plan(plan_request(pack)) if id_part in check.id)


def outcome_of(stage: StageName, id_part: str, faults: Faults, folder: Path) -> Outcome:
    """Plan, sample and judge one check on a pack with faults."""
    pack = FakePack(faults)
    return stage_of(stage).run(planned(stage, id_part, pack), stage_context(pack, folder))
