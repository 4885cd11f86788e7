"""Coverage: the optimised path ran, declined where it must, is noticed when wrong, and writes only what it
may.
"""

import os
from pathlib import Path

import pytest

from harness.domain.check import StageName, Status
from harness.stages.coverage import judge, plan, sample
from harness.stages.coverage.planning import path_cells
from harness.stages.coverage.tables import shapes_of
from tests.fakes.pack import FakePack, Faults
from tests.fakes.requests import outcome_of, plan_request, planned, stage_context
from tests.stages.spoiled_tables import spoiled

COVERAGE = StageName.COVERAGE


def test_path_checks_cover_every_bucket_edge_and_the_joint_row_limit() -> None:
    cells = path_cells(plan_request().claim.envelope, "cpu")
    decode = [cell.batch for cell in cells if cell.phase == "decode"]
    verify = [(cell.batch, cell.drafts) for cell in cells if cell.phase == "verify"]
    assert decode == [1, 4, 64]
    assert verify == [(1, 1), (32, 1), (1, 3), (16, 3)]


def test_every_op_gets_a_poison_check() -> None:
    ids = [check.id for check in plan(plan_request())]
    assert "coverage/poison/mix" in ids
    assert "coverage/poison/head" in ids


def test_an_architecture_that_is_not_dispatched_makes_every_check_unavailable() -> None:
    request = plan_request()
    gpu_only = request.claim.envelope.model_copy(
        update={
            "architectures": (request.claim.envelope.architectures[0].model_copy(update={"arch": "sm_90a"}),)
        }
    )
    from dataclasses import replace

    moved = replace(request, claim=request.claim.model_copy(update={"envelope": gpu_only}))
    assert {check.unavailable for check in plan(moved)} == {"the claim does not dispatch on cpu"}


@pytest.mark.parametrize("part", ["path/cpu.tp1.dcp1.b1.", "path/cpu.tp1.dcp1.b4.", ".d3.bf16.verify"])
def test_an_honest_path_passes_with_the_switch_off_as_its_control(part: str, tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, part, Faults(), tmp_path)
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.kind == "switch_off"
    assert "0 launches" in outcome.control.observed


def test_a_silent_fallback_after_some_steps_is_no_evidence_and_names_its_reason(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(fallback_from_step=3), tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "75.0% of 16 tokens" in outcome.summary
    assert "silent" in outcome.summary


def test_a_fallback_after_the_first_hundred_steps_is_no_evidence(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/long_run", Faults(fallback_from_step=100), tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "89.3% of 112 tokens took the optimised path, 200 launches (declined: silent)" in outcome.summary


def test_counters_and_ledger_that_agree_over_stock_are_caught_by_the_trace(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(counts_without_running=True), tmp_path)
    assert outcome.status is Status.FAIL
    assert "head was seen 0 times in step 3, declared 1" not in outcome.summary
    assert (
        "the kernels that ran are not those declared: aten::matmul ran 1 times in step 3" in outcome.summary
    )


def test_a_kernel_that_the_path_does_not_declare_is_named(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(extra_kernel=True), tmp_path)
    assert outcome.status is Status.FAIL
    assert "aten::mm ran 1 times in step 3, a kernel that the path does not declare" in outcome.summary


def test_a_candidate_that_takes_the_call_hook_blinds_the_trace_and_is_no_evidence(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(takes_hook=True), tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "the interpreter's call hook was replaced" in outcome.summary


def test_arms_whose_ranks_met_by_unlike_collectives_are_no_comparison(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(collective="multicast"), tmp_path)
    assert outcome.status is Status.INVALID
    assert outcome.summary == "the optimised arm's ranks met by multicast, stock's by none"


def test_a_ledger_that_names_other_ranks_than_the_cell_fails(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(said_ranks=2), tmp_path)
    assert outcome.status is Status.FAIL
    assert outcome.summary == "the ledger says tp 2 of step 0, which had 1"


def test_ranks_that_the_pack_has_a_model_for_get_a_cell_of_their_own() -> None:
    envelope = plan_request().claim.envelope.model_copy(update={"tp": (1, 2, 4)})
    cells = path_cells(envelope, "cpu", ranks=(2, 4))
    assert [(c.tp, c.batch) for c in cells if c.tp > 1] == [(2, 2), (4, 2)]


def test_a_ledger_that_lies_is_caught_by_the_kernels_own_counters(tmp_path: Path) -> None:
    faults = Faults(fallback_from_step=3, lying_ledger=True)
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", faults, tmp_path)
    assert outcome.status is Status.FAIL
    assert "the manifest says 4 launches of head, counted 3" in outcome.summary


def test_two_arms_that_both_ran_stock_are_no_evidence(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b1.", Faults(fallback_from_step=0), tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "0.0%" in outcome.summary


@pytest.mark.parametrize("side", ["batch_above_max", "rows_above_max", "prefill"])
def test_work_outside_the_envelope_is_declined_and_equals_stock(side: str, tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, f"decline/{side}", Faults(), tmp_path)
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.kind == "twin"


def test_a_reason_outside_the_packs_closed_list_fails(tmp_path: Path) -> None:
    class Vague(FakePack):
        def decline_reasons(self) -> tuple[str, ...]:
            return ("prefill", "switch_off")

    pack = Vague()
    check = next(c for c in plan(plan_request(pack)) if c.id == "coverage/decline/batch_above_max")
    outcome = judge(check, sample(check, stage_context(pack, tmp_path)))
    assert outcome.status is Status.FAIL
    assert outcome.summary == "declined for rows, which the pack's closed list of reasons does not hold"


def test_a_guard_that_ignores_the_envelope_fails(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "decline/batch_above_max", Faults(takes_everything=True), tmp_path)
    assert outcome.status is Status.FAIL
    assert "2 of 2 steps took the optimised path" in outcome.summary


def test_poisoning_an_op_that_runs_is_noticed(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "poison/mix", Faults(), tmp_path)
    assert outcome.status is Status.PASS


def test_an_op_whose_poison_changes_nothing_is_not_covered(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "poison/head", Faults(deaf_op="head"), tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "does not cover it" in outcome.summary


def test_switching_inside_a_request_equals_never_switching(tmp_path: Path) -> None:
    assert outcome_of(COVERAGE, "transition/", Faults(), tmp_path).status is Status.PASS


def test_state_that_goes_stale_at_a_switch_fails(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "transition/", Faults(stale_after_switch=True), tmp_path)
    assert outcome.status is Status.FAIL


def test_a_step_that_writes_only_its_own_slots_passes_and_the_planted_write_is_named(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "state/", Faults(), tmp_path)
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.observed == "named: embedding, env:FASTTRACK_PLANTED_CHANGE; left on: 6 launches"


def test_a_step_that_writes_a_neighbours_slot_fails_and_names_the_tensor_and_step(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "state/", Faults(writes_neighbour=True), tmp_path)
    assert outcome.status is Status.FAIL
    assert outcome.findings[0].message == "state changed outside the declared state, step 0"


def test_a_flag_left_set_is_named(tmp_path: Path) -> None:
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        outcome = outcome_of(COVERAGE, "state/", Faults(leaves_flag=True), tmp_path)
    finally:
        torch.set_float32_matmul_precision(before)
    assert outcome.status is Status.FAIL
    assert any("torch:matmul_precision" in finding.message for finding in outcome.findings)


def test_an_environment_variable_left_set_is_named_with_its_step(tmp_path: Path) -> None:
    try:
        outcome = outcome_of(COVERAGE, "state/", Faults(leaves_variable=True), tmp_path)
    finally:
        os.environ.pop("FAKE_PACK_WAS_HERE", None)
    assert outcome.status is Status.FAIL
    first = outcome.findings[0].message
    assert first == "env:FAKE_PACK_WAS_HERE changed outside the declared state, step 0"


def test_sums_over_ranks_that_round_after_each_rank_fail(tmp_path: Path) -> None:
    assert outcome_of(COVERAGE, "collective/sum.tp4", Faults(), tmp_path).status is Status.PASS
    outcome = outcome_of(COVERAGE, "collective/sum.tp4", Faults(rounds_every_rank=True), tmp_path)
    assert outcome.status is Status.FAIL
    assert "ulp from the exact one" in outcome.summary


def test_the_ledger_of_each_arm_is_on_disk(tmp_path: Path) -> None:
    outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b1.", Faults(), tmp_path)
    names = sorted(path.name for path in (tmp_path / "ledger").iterdir())
    assert [name.rsplit(".", 2)[-2] for name in names] == ["off", "on"]
    assert FakePack().decline_reasons()[0] == "prefill"


@pytest.mark.parametrize(
    ("part", "table", "arm"),
    [
        ("path/cpu.tp1.dcp1.b1.", "steps", "off"),
        ("transition/", "divergence", "planted"),
        ("poison/mix", "divergence", "poison"),
    ],
)
def test_a_control_without_rows_is_no_control(part: str, table: str, arm: str, tmp_path: Path) -> None:
    pack = FakePack()
    check = planned(COVERAGE, part, pack)
    samples = sample(check, stage_context(pack, tmp_path))
    cut = tuple(
        t.model_copy(update={"rows": tuple(r for r in t.rows if r[0] != arm)}) if t.name == table else t
        for t in samples.tables
    )
    assert judge(check, samples).status is Status.PASS
    assert judge(check, samples.model_copy(update={"tables": cut})).status is Status.NO_EVIDENCE


@pytest.mark.parametrize("part", [
        "path/cpu.tp1.dcp1.b1.", "decline/prefill", "uneven/", "poison/mix", "transition/", "verify/",
        "prefix/", "reuse/", "feature/structured_output", "collective/", "ledger/",
    ],
)  # fmt: skip
def test_samples_that_do_not_fit_are_invalid_and_never_a_crash(part: str, tmp_path: Path) -> None:
    pack = FakePack()
    check = planned(COVERAGE, part, pack)
    samples = sample(check, stage_context(pack, tmp_path))
    for done, bad in spoiled(samples, shapes_of(str(check.parameter("kind")))):
        assert judge(check, bad).status is Status.INVALID, done


def test_state_samples_that_do_not_fit_are_invalid(tmp_path: Path) -> None:
    pack = FakePack()
    check = planned(COVERAGE, "state/", pack)
    for done, bad in spoiled(sample(check, stage_context(pack, tmp_path)), shapes_of("state")):
        assert judge(check, bad).status is Status.INVALID, done
