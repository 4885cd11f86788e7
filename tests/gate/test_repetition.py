"""Bundles that repeat others: counted by who signed them, and refused where they gave otherwise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.domain.check import Outcome, Samples, SampleTable, Status
from harness.domain.replication import Repeated
from harness.gate import Submission, decide, load_submission
from tests.evidence.example_judge import judge
from tests.evidence.example_run import (
    as_planned,
    example_plan,
    example_policy,
    example_samples,
    write_example,
)
from tests.gate.test_decision import TODAY

Load = Callable[..., Submission]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Submission:
    folder = write_example(
        tmp_path_factory.mktemp("first") / "first", example_plan(scene="passing"), "passing"
    )
    return load_submission(folder, judge, as_planned)


@pytest.fixture
def repeat(first: Submission, tmp_path: Path) -> Load:
    """A run that names the first; its sweeps take `slower` times as long on the optimised path."""

    def load(name: str = "again", signer: str | None = None, slower: float = 1.0) -> Submission:
        plan = example_plan(scene="passing", replicates=first.verification.bundle_digest)

        def samples(check: object) -> Samples:
            taken = example_samples(check, plan.tier, "passing")  # type: ignore[arg-type]  # checks of the plan
            if not taken.check.startswith("sweep"):
                return taken
            tables = tuple(_slowed(t, slower) for t in taken.tables)
            return taken.model_copy(update={"tables": tables})

        folder = write_example(tmp_path / name, plan, "passing", samples)
        made = load_submission(folder, judge, as_planned)
        verification = made.verification.model_copy(update={"signer": signer})
        return Submission(name, verification, made.plan, made.outcomes, made.asked)

    return load


def _slowed(table: SampleTable, factor: float) -> SampleTable:
    rows = tuple(
        (arm, block, float(us or 0) * (factor if arm == "optimised" else 1.0))
        for arm, block, us in table.rows
    )
    return table.model_copy(update={"rows": rows})


def test_a_repetition_with_the_same_results_is_shown_and_counts_for_its_signer(
    first: Submission, repeat: Load
) -> None:
    verdict = decide([first, repeat(signer="5" * 64)], example_policy(), today=TODAY)
    (use,) = verdict.replications
    assert (use.bundle, use.repeats, use.answer) == ("again", "first", Repeated.REPLICATED)
    assert (verdict.replicated_by, verdict.exit_code) == (1, 0)


def test_only_distinct_signers_other_than_the_first_runs_own_count(first: Submission, repeat: Load) -> None:
    signed = Submission(
        first.name, first.verification.model_copy(update={"signer": "6" * 64}), first.plan, first.outcomes,
        first.asked,
    )  # fmt: skip
    repeats = [
        repeat("unsigned"), repeat("own", "6" * 64), repeat("one", "5" * 64), repeat("again", "5" * 64),
        repeat("two", "7" * 64),
    ]  # fmt: skip
    verdict = decide([signed, *repeats], example_policy(), today=TODAY)
    assert len(verdict.replications) == 5
    assert verdict.replicated_by == 2


def test_a_repetition_that_gave_otherwise_rejects(first: Submission, repeat: Load) -> None:
    verdict = decide([first, repeat(signer="5" * 64, slower=0.8)], example_policy(), today=TODAY)
    assert verdict.exit_code == 1
    assert verdict.replicated_by == 0
    assert verdict.reasons[0].startswith("again repeats first and does not give the same: sweep/decode/")
    assert "ratio is" in verdict.reasons[0]


def test_a_policy_may_ask_for_repetitions_by_others(first: Submission, repeat: Load, tmp_path: Path) -> None:
    policy = example_policy(min_replications=1)
    plan = example_plan(policy, "passing")
    alone = load_submission(write_example(tmp_path / "alone", plan, "passing"), judge, as_planned)
    verdict = decide([alone], policy, today=TODAY)
    assert verdict.exit_code == 1
    assert verdict.reasons[0].startswith(
        "0 other signers have replicated a bundle, and policy 'smoke' asks for 1; run `fasttrack reproduce"
    )
    again = plan.model_copy(update={"replicates": alone.verification.bundle_digest})
    made = load_submission(write_example(tmp_path / "again", again, "passing"), judge, as_planned)
    signed = Submission(
        "again",
        made.verification.model_copy(update={"signer": "5" * 64}),
        made.plan,
        made.outcomes,
        made.asked,
    )
    assert decide([alone, signed], policy, today=TODAY).exit_code == 0


def test_a_run_that_repeats_a_bundle_which_is_not_here_is_a_run_of_its_own(repeat: Load) -> None:
    verdict = decide([repeat()], example_policy(), today=TODAY)
    assert (verdict.replications, verdict.exit_code) == ((), 0)


def test_an_open_answer_of_a_repetition_neither_counts_nor_rejects(first: Submission, repeat: Load) -> None:
    made = repeat(signer="5" * 64)

    def open_answer(outcome: Outcome) -> Outcome:
        return outcome.model_copy(update={"status": Status.INCONCLUSIVE, "next_step": "x"})

    outcomes = tuple(open_answer(o) for o in made.outcomes)
    unsure = Submission(made.name, made.verification, made.plan, outcomes, made.asked)
    verdict = decide([first, unsure], example_policy(), today=TODAY)
    assert (verdict.replicated_by, verdict.exit_code) == (0, 0)
    assert verdict.replications[0].answer is Repeated.NOT_COMPARABLE
