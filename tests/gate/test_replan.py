"""The gate's own planner over plans that others made."""

from dataclasses import replace

import pytest

from harness.domain.check import StageName
from harness.domain.claim import Envelope
from harness.domain.errors import InputError
from harness.domain.plan import Plan
from harness.engines.packs import harness_digest, source_digest
from harness.gate import replan as replanning
from harness.gate.replan import replan
from harness.planner import CodeDigests, make_plan, plan_seed
from tests.fakes.pack import FakePack
from tests.fakes.requests import CHANGE, plan_request

NONCE = "0" * 16
PACK = FakePack()


@pytest.fixture(autouse=True)
def _fake_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "load_pack", lambda name: PACK)


@pytest.fixture
def plan() -> Plan:
    request = replace(plan_request(PACK), seed=plan_seed(CHANGE.head, NONCE))
    digests = CodeDigests(harness_digest(), source_digest(PACK.root))
    return make_plan(request, digests, NONCE, (StageName.COVERAGE, StageName.EVALS))


def test_a_plan_of_this_harness_is_made_again_alike(plan: Plan) -> None:
    again = replan(plan)
    assert again.is_code_of(plan)
    assert again.checks == plan.checks


def test_a_plan_that_names_another_harness_and_pack_is_planned_all_the_same(plan: Plan) -> None:
    stripped = tuple(c for c in plan.checks if c.op != "mix")
    foreign = plan.model_copy(
        update={"harness_digest": "f" * 64, "pack_digest": "f" * 64, "checks": stripped}
    )
    again = replan(foreign)
    assert not again.is_code_of(foreign)
    assert again.checks == plan.checks


def test_another_nonce_than_the_seeds_come_from_gives_other_questions(plan: Plan) -> None:
    again = replan(plan.model_copy(update={"nonce": "1" * 16}))
    assert again.checks is not None
    assert [c.id for c in again.checks] == [c.id for c in plan.checks]
    assert again.checks != plan.checks


def test_a_pack_that_is_not_installed_is_said_and_nothing_is_planned(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> FakePack:
        raise InputError("no kernel pack is called 'fake'")

    monkeypatch.setattr(replanning, "load_pack", missing)
    again = replan(plan)
    assert (again.checks, again.pack, again.why) == (None, None, "no kernel pack is called 'fake'")


def test_a_claim_that_breaks_the_planner_is_said_and_is_no_crash(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(self: Envelope, cell: object) -> bool:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(Envelope, "admits", odd)
    again = replan(plan)
    assert again.checks is None
    assert again.why == "no plan can be made of it (ZeroDivisionError: division by zero)"


def _narrow(*words: str) -> Plan:
    request = replace(plan_request(PACK), seed=plan_seed(CHANGE.head, NONCE))
    digests = CodeDigests(harness_digest(), source_digest(PACK.root))
    return make_plan(request, digests, NONCE, (StageName.COVERAGE, StageName.EVALS), words)


def test_a_plan_is_narrowed_by_op_subject_cell_or_id(plan: Plan) -> None:
    cell = plan.checks[0].cell
    assert cell is not None
    assert [c.id for c in _narrow("mix", "drift").checks] == ["coverage/poison/mix", "evals/drift/tiny"]
    assert [c.id for c in _narrow("coverage/poison/head").checks] == ["coverage/poison/head"]
    by_cell = _narrow(cell.label())
    assert {c.cell for c in by_cell.checks} == {cell}
    assert by_cell.only == (cell.label(),)


def test_a_narrowed_plan_is_made_again_whole(plan: Plan) -> None:
    again = replan(_narrow("mix", "drift"))
    assert again.checks == plan.checks


def test_words_that_name_no_check_are_told_apart_from_a_policy_without_a_proof() -> None:
    with pytest.raises(InputError, match="no check that mixx names"):
        _narrow("mixx")
