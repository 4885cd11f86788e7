"""Determinism of both arms, undone in-place writes, answers found in memory, and late predecessors."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.domain.check import Check, Outcome, Samples, SampleTable, Severity, Status
from harness.domain.pack import OpContract
from harness.stages import kernels
from tests.stages.kernels.example_pack import NormPack
from tests.stages.kernels.test_kernels import context, first_cell
from tests.stages.spoiled_tables import without_rows

JITTER = ("reader", "round", "delay_us", "is_cold", "is_busy", "output", "elements", "differing")


class Undoing(NormPack):
    """Writes its input in place and puts the old bits back."""

    def run_optimised(self, op: str, implementation: str, args: Any, launches: Any) -> None:
        before = args["x"].clone()
        args["x"].zero_()
        args["x"].copy_(before)
        super().run_optimised(op, implementation, args, launches)


class Searching(NormPack):
    """Looks for a float64 answer of the right shape in this process, and computes where there is none."""

    def run_optimised(self, op: str, implementation: str, args: Any, launches: Any) -> None:
        super().run_optimised(op, implementation, args, launches)
        shape = args["out"].shape
        for found in gc.get_objects():
            if type(found) is torch.Tensor and found.dtype == torch.float64 and found.shape == shape:
                args["out"].copy_(found)
                return
        args["out"].zero_()


def outcome(pack: NormPack, folder: Path) -> Outcome:
    return kernels.run(first_cell(pack), context(pack, folder))


def test_an_input_written_in_place_and_put_back_is_seen_by_its_version(tmp_path: Path) -> None:
    found = outcome(Undoing(), tmp_path)
    assert found.status is Status.FAIL
    assert {f.rule for f in found.findings if f.severity is Severity.ERROR} == {"memory_version"}


def test_a_candidate_that_looks_for_the_answer_in_memory_finds_none(tmp_path: Path) -> None:
    found = outcome(Searching(), tmp_path)
    assert found.status is Status.FAIL
    assert "error_above_bound" in {f.rule for f in found.findings}


def test_a_candidate_less_deterministic_than_stock_passes_and_says_so(tmp_path: Path) -> None:
    pack = NormPack("dithered")
    found = outcome(pack, tmp_path)
    assert found.status is Status.PASS, found.summary
    words = [f.message for f in found.findings if f.rule == "less_deterministic_than_stock"]
    assert len(words) == 3  # over repeats, mates and order
    assert all("stock's 0" in word for word in words)
    figures = {f.name: f.value for f in found.figures}
    assert figures["stock_spread_repeats"] == 0
    assert 0 < float(figures["optimised_spread_repeats"] or 0) < 1


class Sworn(NormPack):
    """Says that its op gives equal bits for equal calls."""

    def ops(self) -> tuple[OpContract, ...]:
        return tuple(op.model_copy(update={"is_deterministic": True}) for op in super().ops())


def test_a_candidate_that_is_said_to_be_deterministic_fails_where_runs_differ(tmp_path: Path) -> None:
    found = outcome(Sworn("dithered"), tmp_path)
    assert found.status is Status.FAIL
    assert {f.rule for f in found.findings if f.severity is Severity.ERROR} == {"differs_from_run_to_run"}
    assert "differ between runs on equal inputs" in found.summary


def test_a_candidate_that_is_deterministic_may_say_so(tmp_path: Path) -> None:
    found = outcome(Sworn(), tmp_path)
    assert (found.status, found.findings) == (Status.PASS, ())


def test_an_op_that_drops_its_claim_to_be_deterministic_is_named(honest: tuple[Check, Samples]) -> None:
    check, samples = honest
    dropped = kernels.judge(check, samples)
    assert dropped.status is Status.PASS
    assert [(f.rule, f.severity, f.message) for f in dropped.findings] == [
        (
            "determinism_not_claimed",
            Severity.WARNING,
            "the pack does not say that norm is deterministic: answers that differ from run to run on equal "
            "inputs fail nothing",
        )
    ]


def test_a_plan_from_before_determinism_was_asked_gets_no_warning_of_it(
    honest: tuple[Check, Samples],
) -> None:
    check, samples = honest
    older = tuple(pair for pair in check.parameters if pair[0] != "is_deterministic")
    assert kernels.judge(check.model_copy(update={"parameters": older}), samples).findings == ()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, Samples]:
    pack = NormPack()
    check = first_cell(pack)
    return check, kernels.sample(check, context(pack, tmp_path_factory.mktemp("honest")))


def test_a_spread_that_was_not_measured_makes_the_check_invalid(honest: tuple[Check, Samples]) -> None:
    check, samples = honest
    found = kernels.judge(check, without_rows(samples, "spread", arm="stock", over="order", output="out"))
    assert found.status is Status.INVALID
    assert "the spread over order was not measured: stock out" in found.summary


def with_jitter(samples: Samples, early: int, patient: int) -> Samples:
    """The same samples with one round of each reader; how many elements each saw wrong is given."""
    seen = {"optimised": 0, "early": early, "patient": patient}
    rows = tuple((reader, 0, 50, True, False, "word", 1, wrong) for reader, wrong in seen.items())
    table = SampleTable(name="jitter", columns=JITTER, rows=rows)
    return samples.model_copy(update={"tables": (*samples.tables, table)})


def test_a_late_predecessor_that_a_hasty_reader_does_not_feel_proves_nothing(
    honest: tuple[Check, Samples],
) -> None:
    check, samples = honest
    assert kernels.judge(check, with_jitter(samples, early=1, patient=0)).status is Status.PASS
    blind = kernels.judge(check, with_jitter(samples, early=0, patient=0))
    assert blind.status is Status.NO_EVIDENCE
    assert "read above the wait" in blind.summary


def test_a_late_predecessor_that_disturbs_a_patient_reader_proves_nothing(
    honest: tuple[Check, Samples],
) -> None:
    check, samples = honest
    outcome = kernels.judge(check, with_jitter(samples, early=1, patient=1))
    assert outcome.status is Status.NO_EVIDENCE
    assert "read below the wait is right" in outcome.summary


def test_rounds_differ_in_delay_cache_and_neighbour_and_follow_the_seed() -> None:
    from harness.measure.jitter import rounds_of

    turns = rounds_of(3)
    assert turns == rounds_of(3) != rounds_of(4)
    assert turns[0].delay_us == 0
    assert {(t.is_cold, t.is_busy) for t in turns} == {
        (False, False), (True, False), (False, True), (True, True)
    }  # fmt: skip
    assert all(5 <= t.delay_us < 200 for t in turns[1:])


class Patching(NormPack):
    """Replaces the checker's comparison of bits, and answers honestly."""

    def run_optimised(self, op: str, implementation: str, args: Any, launches: Any) -> None:
        from harness.measure import trial

        trial.exact_mismatches = lambda got, want: 0
        super().run_optimised(op, implementation, args, launches)


def test_a_candidate_that_replaces_a_function_of_the_checker_fails_whatever_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.measure import trial

    monkeypatch.setattr(trial, "exact_mismatches", trial.exact_mismatches)  # put back afterwards
    found = outcome(Patching(), tmp_path)
    assert found.status is Status.FAIL
    assert found.summary == (
        "the candidate replaced module:harness.measure.trial.exact_mismatches in the process that tries it"
    )


def test_a_replaced_function_that_nobody_would_notice_is_no_evidence(honest: tuple[Check, Samples]) -> None:
    check, samples = honest
    found = kernels.judge(check, without_rows(samples, "process", arm="planted"))
    assert found.status is Status.NO_EVIDENCE
    assert "checker replaced" in found.summary
