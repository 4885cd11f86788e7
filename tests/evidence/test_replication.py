"""A bundle's claims, run a second time."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.domain.check import Check, Figure, Outcome, Status
from harness.domain.machine import Gpu, Machine
from harness.domain.plan import Plan
from harness.domain.replication import CheckReplication, Repeated, Replication
from harness.evidence.reader import Bundle
from harness.evidence.replication import compare_runs, replicate_outcomes
from tests.evidence.example_run import example_plan, many_checks, only, outcome_of

SWEEP = "sweep/decode/cpu.tp1.dcp1.b1.c64.d0.bf16.decode"
ROUTER = "kernels/router/cpu.tp1.dcp1.b1.c64.d0.bf16.decode"
PLAN = only(example_plan(scene="passing"), lambda c: c.id in (SWEEP, ROUTER))


def _outcomes(**changes: Any) -> tuple[Outcome, ...]:
    """Both outcomes as the example gives them, the sweep's changed."""
    router, sweep = (outcome_of(PLAN, check, "passing") for check in (ROUTER, SWEEP))
    return router, sweep.model_copy(update=changes)


def _ratio(value: float, low: float, high: float, noise: float = 0.0) -> tuple[Figure, ...]:
    return (
        Figure(name="ratio", value=value, low=low, high=high),
        Figure(name="null_ratio", value=1.0, low=0.9, high=1.1),
        Figure(name="noise_floor", value=noise),
    )


def _sweep(
    first: Sequence[Outcome], second: Sequence[Outcome], again: Plan = PLAN, plan: Plan = PLAN
) -> CheckReplication:
    found = replicate_outcomes((plan, first), (again, second))
    return next(c for c in found if c.check == SWEEP)


def test_the_same_statuses_and_figures_are_replicated() -> None:
    found = replicate_outcomes((PLAN, _outcomes()), (PLAN, _outcomes()))
    assert [(c.answer, c.first, c.second) for c in found] == [(Repeated.REPLICATED, "PASS", "PASS")] * 2


@pytest.mark.parametrize(
    ("second", "noise", "answer"),
    [
        ((1.55, 1.45, 1.65), 0.0, Repeated.REPLICATED),
        ((1.20, 1.10, 1.40), 0.0, Repeated.NOT_REPLICATED),
        ((1.20, 1.10, 1.40), 0.1, Repeated.REPLICATED),
        ((2.40, 2.30, 2.50), 0.1, Repeated.NOT_REPLICATED),
    ],
)
def test_a_ratio_must_meet_the_first_runs_interval_give_or_take_the_noise(
    second: tuple[float, float, float], noise: float, answer: Repeated
) -> None:
    one = _outcomes(figures=_ratio(1.6, 1.5, 1.7))
    two = _outcomes(figures=_ratio(*second, noise))
    found = _sweep(one, two)
    assert found.answer is answer
    assert [f.name for f in found.figures] == ["ratio"]


def test_a_figure_that_lies_elsewhere_is_said_with_its_interval() -> None:
    found = _sweep(_outcomes(figures=_ratio(1.6, 1.5, 1.7)), _outcomes(figures=_ratio(1.2, 1.1, 1.4)))
    assert found.why == "ratio is 1.2 here, outside of 1.5 to 1.7"


def test_a_pass_that_fails_here_is_not_replicated() -> None:
    failed = _outcomes(status=Status.FAIL, summary="0.80x", next_step="x")
    found = _sweep(_outcomes(), failed)
    assert (found.answer, found.why) == (Repeated.NOT_REPLICATED, "PASS in the bundle and FAIL here: 0.80x")


def test_a_failure_that_fails_again_is_replicated_wherever_its_figures_lie() -> None:
    one = _outcomes(status=Status.FAIL, next_step="x", figures=_ratio(0.8, 0.7, 0.9))
    two = _outcomes(status=Status.FAIL, next_step="x", figures=_ratio(0.5, 0.4, 0.6))
    assert _sweep(one, two).answer is Repeated.REPLICATED


@pytest.mark.parametrize("status", [Status.INCONCLUSIVE, Status.NO_EVIDENCE, Status.SKIPPED, Status.INVALID])
def test_an_answer_that_tells_nothing_is_not_comparable(status: Status) -> None:
    open_answer = _outcomes(status=status, summary="too noisy", next_step="x")
    assert _sweep(_outcomes(), open_answer).why == f"{status.value} here: too noisy"
    assert _sweep(open_answer, _outcomes()).why == f"{status.value} in the bundle: too noisy"
    assert _sweep(_outcomes(), open_answer).answer is Repeated.NOT_COMPARABLE


def _with_machine(machine: Machine) -> Plan:
    return PLAN.model_copy(update={"machine": machine})


def test_times_of_another_kind_of_machine_are_not_comparable_and_errors_are() -> None:
    other = _with_machine(PLAN.machine.model_copy(update={"cpu_model": "Another CPU"}))
    found = replicate_outcomes((PLAN, _outcomes()), (other, _outcomes()))
    assert {c.check: c.answer for c in found} == {
        ROUTER: Repeated.REPLICATED,
        SWEEP: Repeated.NOT_COMPARABLE,
    }
    h200 = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=1)
    one, two = (
        _with_machine(PLAN.machine.model_copy(update={"gpus": (h200,), "cpu_model": model}))
        for model in ("a", "b")
    )
    assert _sweep(_outcomes(), _outcomes(), again=two, plan=one).answer is Repeated.REPLICATED


def test_other_kernels_or_another_question_are_not_comparable() -> None:
    kernels = PLAN.model_copy(update={"pack_digest": "9" * 64})
    assert _sweep(_outcomes(), _outcomes(), kernels).why == (
        "the kernels here (pack digest 999999999999) are not those of the bundle (222222222222)"
    )

    def soften(check: Check) -> Check:
        return check.model_copy(update={"parameters": (("seed", 1),)}) if check.id == SWEEP else check

    softer = PLAN.model_copy(update={"checks": tuple(soften(c) for c in PLAN.checks)})
    assert _sweep(_outcomes(), _outcomes(), softer).why == "it asks another question than in the bundle"
    assert _sweep(_outcomes(), _outcomes(), plan=only(PLAN, lambda c: c.id == ROUTER)).why == (
        "the bundle did not plan it"
    )


def _bundle(outcomes: tuple[Outcome, ...]) -> Bundle:
    made = many_checks(1, "passing")
    return Bundle(made.folder, None, "d" * 64, PLAN, None, outcomes)


def test_one_check_that_is_not_replicated_decides_and_one_that_cannot_be_compared_does_not() -> None:
    first = _bundle(_outcomes())
    failed = compare_runs(first, _bundle(_outcomes(status=Status.FAIL, next_step="x")))
    assert (failed.answer, failed.exit_code) == (Repeated.NOT_REPLICATED, 1)
    open_answer = compare_runs(first, _bundle(_outcomes(status=Status.INCONCLUSIVE, next_step="x")))
    assert (open_answer.answer, open_answer.exit_code) == (Repeated.REPLICATED, 0)
    nothing = compare_runs(first, _bundle(()))
    assert (nothing.answer, nothing.exit_code, nothing.why) == (
        Repeated.NOT_COMPARABLE, 2, "it has no outcome here",
    )  # fmt: skip


def test_a_replication_that_its_checks_do_not_give_cannot_be_built() -> None:
    failed = compare_runs(_bundle(_outcomes()), _bundle(_outcomes(status=Status.FAIL, next_step="x")))
    with pytest.raises(ValueError, match="these checks make it not_replicated"):
        Replication.model_validate({**failed.model_dump(), "answer": "replicated", "exit_code": 0})
