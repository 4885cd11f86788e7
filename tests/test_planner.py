"""What a plan will take and what it leaves out, told so that a person reads it in one screen."""

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName
from harness.domain.errors import InputError
from harness.domain.machine import Gpu, Machine, Tier
from harness.domain.plan import Plan
from harness.planner import (
    CodeDigests,
    estimate_costs,
    gpus_needed,
    make_plan,
    resolve_tier,
    skipped_by_reason,
    stated_once,
)
from tests.evidence.example_run import example_claim, example_machine
from tests.fakes.requests import plan_request


def test_a_stage_that_shares_cores_takes_half_the_sum_but_no_less_than_its_longest_check() -> None:
    plan = _plan(
        _check("coverage/path/a", StageName.COVERAGE, cost_s=3.0),
        _check("coverage/path/b", StageName.COVERAGE, cost_s=3.0),
        _check("coverage/path/c", StageName.COVERAGE, cost_s=50.0, unavailable="no GPU"),
        _check("evals/drift/a", StageName.EVALS, cost_s=9.0),
        _check("evals/drift/b", StageName.EVALS, cost_s=1.0),
        _check("sweep/step/a", StageName.SWEEP, cost_s=3.0),
        _check("sweep/step/b", StageName.SWEEP, cost_s=4.0),
    )
    assert [(c.stage.value, c.checks, c.unavailable, c.wanted, c.seconds) for c in estimate_costs(plan)] == [
        ("coverage", 2, 1, Tier.SMOKE, 3.0),
        ("evals", 2, 0, Tier.SMOKE, 9.0),
        ("sweep", 2, 0, Tier.SMOKE, 7.0),
    ]


def test_checks_that_prove_the_same_of_different_ops_are_stated_once() -> None:
    plan = _plan(
        _check("kernels/mix/a", StageName.KERNELS, op="mix", proves="mix is right, remix or not"),
        _check("kernels/head/a", StageName.KERNELS, op="head", proves="head is right, remix or not"),
        _check("kernels/head/b", StageName.KERNELS, op="head", proves="head is right", unavailable="no GPU"),
        _check("evals/drift/a", StageName.EVALS, proves="each op is right, remix or not"),
    )
    assert [(group.words, len(group.checks)) for group in stated_once(plan)] == [
        ("each op is right, remix or not", 2),
        ("each op is right, remix or not", 1),
    ]


def test_checks_that_cannot_run_are_grouped_by_reason_most_frequent_first() -> None:
    plan = _plan(
        _check("kernels/mix/a", StageName.KERNELS, unavailable="needs a license"),
        _check("kernels/mix/b", StageName.KERNELS, unavailable="no GPU"),
        _check("evals/drift/a", StageName.EVALS, unavailable="no GPU"),
        _check("evals/drift/b", StageName.EVALS),
    )
    assert [(group.words, [c.id for c in group.checks]) for group in skipped_by_reason(plan)] == [
        ("no GPU", ["kernels/mix/b", "evals/drift/a"]),
        ("needs a license", ["kernels/mix/a"]),
    ]


@pytest.mark.parametrize(
    ("gpus", "asked", "words"),
    [
        (0, "rank", "tier rank needs one GPU of a supported kind in one machine, and this one has none"),
        (1, "node", "tier node needs 2 GPUs of a supported kind in one machine, and this one has 1"),
        (1, "claim", "tier claim needs 8 GPUs of a supported kind in one machine, and this one has 1"),
        (4, "claim", "and this one has 4 (4 seen): run here with --tier node"),
        (8, "god", "--tier 'god' is no tier; the tiers are auto, smoke, rank, node, claim"),
    ],
)
def test_a_tier_that_a_machine_cannot_give_is_refused_with_what_it_takes(
    gpus: int, asked: str, words: str
) -> None:
    with pytest.raises(InputError) as refused:
        resolve_tier(asked, _machine(gpus), example_claim())
    assert words in str(refused.value)


def test_a_machine_gives_every_tier_up_to_its_own_and_auto_stops_short_of_the_claimed_size() -> None:
    claim = example_claim()
    given = {asked: resolve_tier(asked, _machine(8), claim).value for asked in (*Tier, "auto")}
    assert given == {
        "smoke": "smoke", "rank": "rank", "node": "node", "claim": "claim", "auto": "node",
    }  # fmt: skip
    assert resolve_tier("auto", _machine(1), claim) is Tier.RANK


def _machine(gpus: int) -> Machine:
    one = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=1)
    return example_machine().model_copy(update={"gpus": (one,) * gpus})


def _plan(*checks: Check) -> Plan:
    digests = CodeDigests("a" * 64, "b" * 64)
    made = make_plan(plan_request(), digests, "0123456789abcdef", (StageName.COVERAGE,))
    return made.model_copy(update={"checks": checks})


def _check(
    check_id: str,
    stage: StageName,
    *,
    cost_s: float = 1.0,
    unavailable: str | None = None,
    op: str | None = None,
    proves: str = "it holds",
) -> Check:
    return Check(id=check_id, stage=stage, proves=proves, op=op, cost_s=cost_s, unavailable=unavailable)


@pytest.mark.parametrize(
    ("gpus", "tier", "tp", "needed"),
    [
        (0, Tier.SMOKE, 1, 0),
        (4, Tier.SMOKE, 1, 1),
        (4, Tier.RANK, 8, 1),  # one rank's shapes
        (4, Tier.NODE, 1, 2),
        (4, Tier.CLAIM, 4, 4),
    ],
)
def test_a_check_takes_the_gpus_that_its_evidence_needs(gpus: int, tier: Tier, tp: int, needed: int) -> None:
    gpu = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=2**37)
    machine = example_machine().model_copy(update={"gpus": (gpu,) * gpus})
    check = Check(
        id="sweep/step/a", stage=StageName.SWEEP, proves="it holds", cost_s=1.0, tier=tier, cell=Cell(tp=tp)
    )
    assert gpus_needed(_plan(check).model_copy(update={"machine": machine}), check) == needed
