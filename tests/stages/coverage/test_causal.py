"""The causal matrix: an eval that does not notice an op being wrong is no evidence about it."""

from dataclasses import replace
from pathlib import Path

from harness.domain.check import Check, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.machine import Tier
from harness.domain.policy import Proof
from harness.stages.coverage import judge, plan, run
from tests.fakes.pack import FakePack, Faults
from tests.fakes.requests import POLICY, plan_request, stage_context

COLUMNS = ("arm", "op", "item", "tokens", "digest", "is_right")


def planned(name: str, pack: FakePack | None = None) -> Check:
    """The check of one eval in a full run."""
    request = replace(plan_request(pack), is_full=True)
    return next(c for c in plan(request) if c.id == f"coverage/causal/{name}")


def judged(poisoned: dict[str, int], *, stock_changed: int = 0, launches: int = 9) -> Outcome:
    """The outcome where each op, poisoned, changes so many of four answers."""
    rows = []
    arms = [
        ("clean", "", 0),
        ("stock", "", stock_changed),
        *(("poison", op, n) for op, n in poisoned.items()),
    ]
    for arm, op, count in arms:
        rows += [(arm, op, f"q{n}", 5, "other" if n < count else "same", True) for n in range(4)]
    check = planned("copy")
    tables = (
        SampleTable(name="answers", columns=COLUMNS, rows=tuple(rows)),
        SampleTable(name="ran", columns=("op", "launches"), rows=tuple((op, launches) for op in poisoned)),
    )
    return judge(check, Samples(check=check.id, tier=Tier.SMOKE, tables=tables))


def test_an_eval_that_notices_every_op_passes_and_says_how_many_answers_each_one_changed() -> None:
    outcome = judged({"mix": 4, "head": 2}, stock_changed=1)

    assert outcome.status is Status.PASS
    assert outcome.summary == "copy notices each of 2 ops being wrong; stock changes 1 answers"
    assert outcome.control is not None
    assert outcome.control.observed == "mix 4 of 4, head 2 of 4"


def test_an_op_whose_poison_changes_no_more_than_the_path_itself_is_not_covered() -> None:
    outcome = judged({"mix": 4, "head": 1}, stock_changed=1)

    assert outcome.status is Status.NO_EVIDENCE
    assert outcome.summary == "copy does not notice head when wrong: it is no evidence about them"


def test_an_op_that_never_ran_is_not_covered_either() -> None:
    assert judged({"mix": 4}, launches=0).summary == "no op of the path ran in this eval"


def test_the_matrix_is_for_full_runs_and_stops_nobody_unless_the_policy_names_it() -> None:
    assert not [c for c in plan(plan_request()) if "/causal/" in c.id]
    assert not planned("copy").is_required
    coverage = Proof(stage=StageName.COVERAGE, subjects=("causal",))
    others = tuple(p for p in POLICY.proofs if p.stage is not StageName.COVERAGE)
    policy = POLICY.model_copy(update={"proofs": (*others, coverage)})
    asked = [c for c in plan(replace(plan_request(policy=policy), is_full=True)) if "/causal/" in c.id]
    assert all(c.is_required for c in asked)


def test_ops_that_a_real_session_does_not_notice_are_named(tmp_path: Path) -> None:
    said = []
    for faults in (Faults(), Faults(deaf_op="mix")):
        pack = FakePack(faults)
        said.append(run(planned("copy", pack), stage_context(pack, tmp_path)).summary)

    # A head that scales every other logit leaves the likeliest token of this model where it was.
    assert said == [
        "copy does not notice head when wrong: it is no evidence about them",
        "copy does not notice mix, head when wrong: it is no evidence about them",
    ]
