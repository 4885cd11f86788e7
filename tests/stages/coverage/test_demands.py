"""Cells that the policy demands: each is a required check, and an empty one is named with what fills it."""

from pathlib import Path

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName, Status
from harness.domain.policy import CellDemand, Policy, Proof
from harness.stages.coverage import plan, run
from harness.stages.coverage.demands import unreached
from tests.fakes.pack import FakePack, Faults
from tests.fakes.requests import POLICY, plan_request, stage_context

FP8 = "coverage/path/cpu.tp1.dcp1.b3.c40.d0.fp8.decode"


def demanding(*demands: CellDemand, subjects: tuple[str, ...] = ()) -> Policy:
    """The test policy with cells demanded of coverage."""
    coverage = Proof(stage=StageName.COVERAGE, subjects=subjects, cells=demands)
    others = tuple(p for p in POLICY.proofs if p.stage is not StageName.COVERAGE)
    return POLICY.model_copy(update={"proofs": (*others, coverage)})


def planned_by(policy: Policy, pack: FakePack | None = None) -> dict[str, Check]:
    return {check.id: check for check in plan(plan_request(pack, policy))}


def test_a_demanded_cell_that_the_claim_does_not_derive_becomes_a_required_check() -> None:
    demand = CellDemand(batch=(3,), context=(40,), drafts=(0, 1), kv_dtype=("bf16",), min_tokens=50)
    checks = planned_by(demanding(demand, subjects=("poison",)))

    decode = checks["coverage/path/cpu.tp1.dcp1.b3.c40.d0.bf16.decode"]
    verify = checks["coverage/path/cpu.tp1.dcp1.b3.c40.d1.bf16.verify"]
    assert (decode.is_required, decode.number("min_tokens"), decode.parameter("steps")) == (True, 50, 17)
    assert (verify.is_required, verify.number("min_tokens"), verify.parameter("steps")) == (True, 50, 9)


def test_a_demand_about_a_derived_cell_raises_what_that_one_must_hold_and_plans_it_once() -> None:
    free, demanded = planned_by(POLICY), planned_by(demanding(CellDemand(batch=(4,), min_tokens=100)))

    name = "coverage/path/cpu.tp1.dcp1.b4.c24.d0.bf16.decode"
    assert list(free) == list(demanded)
    assert (free[name].number("min_tokens"), demanded[name].number("min_tokens")) == (1, 100)
    assert demanded[name].parameter("steps") == 25


def test_cells_that_the_claim_does_not_cover_are_none() -> None:
    assert planned_by(demanding(CellDemand(batch=(9999,), tp=(7,)))).keys() == planned_by(POLICY).keys()


def test_a_demanded_feature_is_tried_in_its_cell(tmp_path: Path) -> None:
    demand = CellDemand(batch=(4,), context=(30,), feature=("structured_output",), min_tokens=24)
    pack = FakePack(Faults())
    check = planned_by(demanding(demand), pack)[
        "coverage/feature/structured_output.cpu.tp1.dcp1.b4.c30.d0.bf16.decode"
    ]

    outcome = run(check, stage_context(pack, tmp_path))

    assert outcome.status is Status.PASS
    assert outcome.summary.startswith("24 tokens with structured_output")


def test_a_demanded_cell_that_stays_empty_is_no_evidence_named_with_the_command_that_fills_it(
    tmp_path: Path,
) -> None:
    pack = FakePack(Faults(fallback_from_step=5))
    check = planned_by(demanding(CellDemand(batch=(4,), min_tokens=100)), pack)[
        "coverage/path/cpu.tp1.dcp1.b4.c24.d0.bf16.decode"
    ]

    outcome = run(check, stage_context(pack, tmp_path))

    assert outcome.status is Status.NO_EVIDENCE
    assert "fewer than the 100 that this cell must hold" in outcome.summary
    assert "in cpu.tp1.dcp1.b4.c24.d0.bf16.decode" in outcome.next_step
    assert f"`fasttrack run coverage --only {check.id} --tier smoke`" in outcome.next_step


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"context": 65536}, "a CPU takes too long over a context of 65536; needs a GPU"),
        ({"arch": "sm_90a", "tp": 4}, None),
        ({"arch": "sm_90a", "tp": 8}, "the pack has no small model that 8 ranks of one process can share"),
        ({"dcp": 2}, "a context divided over 2 ranks needs an engine that divides it"),
        ({"context": 4096, "tp": 2}, None),
    ],
)
def test_what_this_engine_cannot_serve_says_why(fields: dict[str, object], reason: str | None) -> None:
    assert unreached(Cell.model_validate({"arch": "cpu", **fields}), FakePack(ranks=(1, 2, 4))) == reason


def test_stages_that_generate_nothing_take_no_cells_and_features_take_no_drafts() -> None:
    with pytest.raises(ValueError, match="cells are demanded of coverage, evals and sweeps"):
        Proof(stage=StageName.KERNELS, cells=(CellDemand(),))
    with pytest.raises(ValueError, match="drafts in a demand of their own"):
        CellDemand(drafts=(1,), feature=("structured_output",))
