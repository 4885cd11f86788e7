"""Two sweeps side by side: first whether they can be, then ratios with intervals."""

from typing import Any

from harness.domain.check import Figure, Outcome, StageName, Status
from harness.domain.machine import Gpu, Tier
from harness.domain.plan import Plan
from harness.planner import CodeDigests, make_plan
from harness.stages.sweep.comparing import SweepComparison, compare_sweeps
from tests.fakes.requests import plan_request

Run = tuple[Plan, tuple[Outcome, ...]]


def _plan(seed: int = 7) -> Plan:
    request = plan_request(seed=seed)
    digests = CodeDigests("a" * 64, "b" * 64)
    return make_plan(
        request, digests, "0123456789abcdef", (StageName.SWEEP,), ("cpu.tp1.dcp1.b1.c64.d0.bf16.decode",)
    )


def _outcomes(plan: Plan, stock: float, mine: float, status: Status = Status.FAIL) -> tuple[Outcome, ...]:
    """Gains known to within 1 % each way, noise 2 %."""
    gain = stock / mine
    figures = (
        Figure(name="stock_us", value=stock), Figure(name="optimised_us", value=mine),
        Figure(name="noise_floor", value=0.02),
        Figure(name="ratio", value=gain, low=gain * 0.99, high=gain * 1.01),
    )  # fmt: skip
    check = plan.checks[0].id
    return (
        Outcome(check=check, status=status, tier=Tier.SMOKE, summary="x", next_step="y", figures=figures),
    )


def _compared(one: Run, two: Run) -> SweepComparison:
    """The second run against the first; it timed another build."""
    return compare_sweeps(one, (two[0].model_copy(update={"pack_digest": "c" * 64}), two[1]))


def test_two_runs_of_one_build_compare_nothing() -> None:
    plan = _plan()
    found = compare_sweeps((plan, _outcomes(plan, 200.0, 100.0)), (plan, _outcomes(plan, 200.0, 50.0)))
    assert found.exit_code == 2
    assert found.obstacles[0].startswith("both runs timed one build of the pack (bbbbbbbbbbbb)")


def test_a_run_that_is_twice_as_fast_differs_with_its_interval() -> None:
    """100 over 50 us: 2 x 0.99 / 1.01 x 0.96 to 2 x 1.01 / 0.99 x 1.04."""
    plan = _plan()
    found = _compared((plan, _outcomes(plan, 200.0, 100.0)), (plan, _outcomes(plan, 200.0, 50.0)))
    (cell,) = found.cells
    assert (cell.ratio, cell.is_alike, cell.words) == (2.0, False, "the second run is faster")
    assert (round(cell.low or 0, 3), round(cell.high or 0, 3)) == (1.882, 2.122)
    assert found.exit_code == 1


def test_runs_within_their_noise_are_alike_whatever_their_seeds_are() -> None:
    one, two = _plan(7), _plan(8)
    found = _compared((one, _outcomes(one, 200.0, 100.0)), (two, _outcomes(two, 201.0, 102.0)))
    assert found.exit_code == 0
    assert found.cells[0].words == "alike"


def test_a_cell_in_which_stock_itself_moved_has_no_ratio() -> None:
    plan = _plan()
    found = _compared((plan, _outcomes(plan, 200.0, 100.0)), (plan, _outcomes(plan, 100.0, 50.0)))
    assert found.cells[0].ratio is None
    assert "stock itself moved by +100%" in found.cells[0].words
    assert found.exit_code == 2


def test_machines_that_differ_are_named_field_by_field_and_nothing_is_compared() -> None:
    plan = _plan()
    gpu = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=1)
    changed: dict[str, Any] = {"gpus": (gpu, gpu), "driver": "580.1", "libraries": (("torch", "2.14.0"),)}
    other = plan.model_copy(update={"machine": plan.machine.model_copy(update=changed)})
    found = _compared((plan, _outcomes(plan, 2.0, 1.0)), (other, _outcomes(other, 2.0, 1.0)))
    assert found.obstacles == (
        "gpus: no GPU and 2 x NVIDIA H200", "driver: not read and 580.1", "torch: none and 2.14.0",
    )  # fmt: skip
    assert (found.cells, found.exit_code) == ((), 2)


def test_cards_of_one_name_that_differ_are_told_with_what_differs() -> None:
    plan = _plan()
    found = []
    for memory in (1, 2):
        gpus = (Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=memory),)
        machine = plan.machine.model_copy(update={"gpus": gpus})
        found.append(plan.model_copy(update={"machine": machine}))
    (obstacle,) = _compared(*((p, _outcomes(p, 2.0, 1.0)) for p in found)).obstacles
    assert "memory_bytes=1" in obstacle
    assert "memory_bytes=2" in obstacle


def test_a_cell_that_was_asked_of_another_model_is_not_compared() -> None:
    plan = _plan()
    check = plan.checks[0]
    parameters = tuple((k, "large" if k == "model" else v) for k, v in check.parameters)
    other = plan.model_copy(update={"checks": (check.model_copy(update={"parameters": parameters}),)})
    found = _compared((plan, _outcomes(plan, 2.0, 1.0)), (other, _outcomes(other, 2.0, 1.0)))
    assert found.obstacles == (f"{check.id} was asked otherwise: model tiny and large",)


def test_a_cell_without_a_verdict_in_one_run_says_so() -> None:
    plan = _plan()
    noisy = _outcomes(plan, 2.0, 1.0, Status.INCONCLUSIVE)
    found = _compared((plan, _outcomes(plan, 2.0, 1.0)), (plan, noisy))
    assert found.cells[0].words == "INCONCLUSIVE in the second run"
    assert found.exit_code == 2
