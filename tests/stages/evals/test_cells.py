"""Cells of the envelope in which an eval generated its tokens, and those in which the policy wants some."""

import pytest
from pydantic import ValidationError

from harness.domain.cell_tokens import CellNeed, parse_needs
from harness.domain.check import Check, Samples, StageName, Status
from harness.domain.errors import InputError
from harness.domain.machine import Tier
from harness.domain.policy import CellDemand, Proof
from harness.engines.serving import StepTotal
from harness.stages.evals import judge, plan, sample
from harness.stages.evals.ledger_tables import cell_faults, ledger_tables
from tests.fakes.pack import FakePack
from tests.fakes.requests import POLICY, plan_request, stage_context

EVALS = StageName.EVALS


def planned_by(*demands: CellDemand) -> dict[str, Check]:
    """Evals of the fake pack under the test policy with cells demanded of them."""
    changed = (p.model_copy(update={"cells": demands}) if p.stage is EVALS else p for p in POLICY.proofs)
    policy = POLICY.model_copy(update={"proofs": tuple(changed)})
    return {str(check.subject): check for check in plan(plan_request(None, policy))}


def needs_of(check: Check) -> tuple[CellNeed, ...]:
    return parse_needs(str(dict(check.parameters)["cells"]))


@pytest.fixture(scope="module")
def drift(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, Samples]:
    """Samples of the fake pack's drift eval: 192 tokens of two requests; its ledger tells contexts of 1."""
    pack = FakePack()
    check = planned_by()["drift"]
    return check, sample(check, stage_context(pack, tmp_path_factory.mktemp("drift")))


def judged_under(demand: CellDemand, samples: Samples) -> tuple[Status, str, str]:
    outcome = judge(planned_by(demand)["drift"], samples)
    return outcome.status, outcome.summary, outcome.next_step


def test_a_demand_is_put_to_the_evals_that_it_names_as_the_bucket_of_its_batch() -> None:
    checks = planned_by(CellDemand(batch=(4,), context=(24,), min_tokens=9, evals=("drift",)))
    assert needs_of(checks["drift"]) == (CellNeed(batch_min=2, batch_max=4, context=24, min_tokens=9),)
    assert [name for name, check in checks.items() if "cells" in dict(check.parameters)] == ["drift"]


def test_a_demand_that_names_no_eval_is_put_to_each_and_one_outside_the_claim_to_none() -> None:
    assert all("cells" in dict(check.parameters) for check in planned_by(CellDemand()).values())
    assert planned_by(CellDemand(batch=(9999,))) == planned_by()


def test_a_demand_of_an_eval_that_no_claim_has_is_an_error() -> None:
    with pytest.raises(InputError, match="demands cells of 'drfit', and there is none"):
        planned_by(CellDemand(evals=("drfit",)))
    assert planned_by(CellDemand(evals=("aime25_served",))) == planned_by()


def test_an_eval_whose_cell_is_filled_passes(drift: tuple[Check, Samples]) -> None:
    assert judged_under(CellDemand(batch=(4,), context=(1,), min_tokens=192), drift[1])[0] is Status.PASS


def test_an_empty_cell_of_an_eval_is_no_evidence_named_and_says_what_fills_it(
    drift: tuple[Check, Samples],
) -> None:
    status, summary, next_step = judged_under(CellDemand(batch=(1,), min_tokens=50), drift[1])
    assert status is Status.NO_EVIDENCE
    assert "batch 1, context from 24: 0 of 50" in summary
    assert f"`fasttrack run evals --only {drift[0].id} --tier smoke --full`" in next_step


def test_cells_that_hold_other_tokens_than_the_ledgers_totals_are_invalid(
    drift: tuple[Check, Samples],
) -> None:
    check, samples = drift
    tables = tuple(
        t.model_copy(update={"rows": tuple((*row[:-1], int(row[-1] or 0) + 1) for row in t.rows)})
        if t.name == "cells"
        else t
        for t in samples.tables
    )
    outcome = judge(check, samples.model_copy(update={"tables": tables}))
    assert outcome.status is Status.INVALID
    assert "its cells hold" in outcome.summary


def test_a_ledger_is_totalled_by_path_by_load_and_by_cell() -> None:
    kinds = {
        ("optimised", StepTotal("decode", "optimised", "taken", 2, 64, 0)): 6,
        ("optimised", StepTotal("decode", "optimised", "taken", 2, 128, 0)): 4,
        ("optimised", StepTotal("prefill", "stock", "phase_not_claimed", 2, 64, 0)): 90,
    }
    steps, cells, loads = ledger_tables(kinds, has_loads=True)
    assert steps.rows == (
        ("optimised", "decode", "optimised", "taken", 10),
        ("optimised", "prefill", "stock", "phase_not_claimed", 90),
    )
    assert cells.rows == (
        ("optimised", "decode", "optimised", 2, 128, 0, 4),
        ("optimised", "decode", "optimised", 2, 64, 0, 6),
    )
    assert loads.rows == (("optimised", "decode", 2, 10), ("optimised", "prefill", 2, 90))
    assert cell_faults(Samples(check="evals/a", tier=Tier.SMOKE, tables=(steps, cells))) == ()


def test_cells_in_another_batch_than_the_loads_say_are_named() -> None:
    kinds = {("optimised", StepTotal("decode", "optimised", "taken", 2, 64, 0)): 6}
    steps, cells, loads = ledger_tables(kinds, has_loads=True)
    moved = cells.model_copy(update={"rows": (("optimised", "decode", "optimised", 64, 64, 0, 6),)})
    samples = Samples(check="evals/a", tier=Tier.SMOKE, tables=(steps, moved, loads))
    assert cell_faults(samples) == (
        "arm optimised generated 6 tokens in decode steps with requests 2, and its cells hold 0",
        "arm optimised generated 0 tokens in decode steps with requests 64, and its cells hold 6",
    )


def test_a_demand_of_an_eval_that_nobody_asks_cannot_be_written() -> None:
    demand = CellDemand(evals=("mrcr", "drift"))
    with pytest.raises(ValidationError, match="cells are demanded of mrcr, which `subjects` does not ask"):
        Proof(stage=EVALS, subjects=("drift",), cells=(demand,))
    assert Proof(stage=EVALS, subjects=("drift", "features"), cells=(demand,)).cells == (demand,)


@pytest.mark.parametrize(
    ("stage", "demand"),
    [
        (StageName.KERNELS, CellDemand()),
        (StageName.SWEEP, CellDemand(feature=("structured_output",))),
        (StageName.COVERAGE, CellDemand(evals=("drift",))),
        (EVALS, CellDemand(feature=("structured_output",))),
    ],
)
def test_a_demand_in_the_wrong_place_cannot_be_written(stage: StageName, demand: CellDemand) -> None:
    with pytest.raises(ValidationError):
        Proof(stage=stage, cells=(demand,))
