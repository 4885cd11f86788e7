"""Coverage of a request's life: kept rows, prefix hits, used slots, features and transitions."""

from pathlib import Path

import pytest

from harness.domain.check import StageName, Status
from harness.stages.coverage import plan
from tests.fakes.pack import Faults
from tests.fakes.requests import outcome_of, plan_request

COVERAGE = StageName.COVERAGE
SOUND = (
    "uneven/uneven_drafts", "verify/kept_rows", "prefix/hit", "reuse/slot", "feature/temperature_sampling",
    "feature/structured_output", "feature/chunked_prefill", "transition/optimised_stock_optimised",
    "transition/batch_grows", "transition/prefill_joins", "transition/draft_rejected",
)  # fmt: skip


@pytest.mark.parametrize("part", SOUND)
def test_a_sound_pack_passes_and_its_control_fails(part: str, tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, part, Faults(), tmp_path)
    assert outcome.status is Status.PASS, outcome.summary


@pytest.mark.parametrize(
    ("part", "faults", "status", "words"),
    [
        ("uneven/", Faults(takes_uneven=True), Status.FAIL, "1 of 1 steps took the optimised path"),
        ("verify/", Faults(loses_kept_row=True), Status.FAIL, "from the oracle"),
        ("prefix/", Faults(forgets_prefix_state=True), Status.FAIL, "behind a prefix hit"),
        ("prefix/", Faults(never_hits=True), Status.NO_EVIDENCE, "the prefix cache never hit"),
        ("reuse/", Faults(dirty_slot=True), Status.FAIL, "in a slot used before"),
        ("feature/temperature_sampling", Faults(nan_from_step=2), Status.FAIL, "not finite"),
        ("feature/structured_output", Faults(fallback_from_step=2), Status.NO_EVIDENCE, "silent"),
        ("transition/batch_grows", Faults(fallback_from_step=0), Status.NO_EVIDENCE, "nothing was switched"),
    ],
)
def test_a_fault_of_a_requests_life_is_caught_and_named(
    part: str, faults: Faults, status: Status, words: str, tmp_path: Path
) -> None:
    outcome = outcome_of(COVERAGE, part, faults, tmp_path)
    assert (outcome.status, words in outcome.summary) == (status, True), outcome.summary


def test_a_cell_without_evidence_names_the_command_that_fills_it(tmp_path: Path) -> None:
    outcome = outcome_of(COVERAGE, "path/cpu.tp1.dcp1.b4.", Faults(fallback_from_step=0), tmp_path)
    assert outcome.next_step == (
        "make the optimised path run in cpu.tp1.dcp1.b4.c24.d0.bf16.decode (the ledger holds the decline "
        "reasons), then `fasttrack run coverage --only coverage/path/cpu.tp1.dcp1.b4.c24.d0.bf16.decode "
        "--tier smoke`"
    )


def test_a_policy_says_which_kinds_and_context_bands_need_evidence() -> None:
    request = plan_request()
    proofs = tuple(
        proof.model_copy(update={"subjects": ("path",), "thresholds": (("context_bands", "24,512"),)})
        if proof.stage is COVERAGE
        else proof
        for proof in request.policy.proofs
    )
    from dataclasses import replace

    checks = plan(replace(request, policy=request.policy.model_copy(update={"proofs": proofs})))
    assert {check.id.split("/")[1] for check in checks if check.is_required} == {"path"}
    assert [c.cell.context for c in checks if c.cell and c.cell.context > 24] == [512]
