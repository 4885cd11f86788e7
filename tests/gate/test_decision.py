"""The gate's rules: each has a bundle that breaks it alone."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from harness.documents import load_rules
from harness.domain.bundle import BundleState
from harness.domain.change import Sha
from harness.domain.check import Check, Finding, Outcome, Samples, Severity, StageName, Status
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.domain.policy import Policy, Proof
from harness.domain.verdict import Answer, Contribution, Verdict
from harness.evidence.verify import Replanned
from harness.gate import Move, Submission, decide, load_submission
from harness.gate.merging import counted_tier
from harness.gate.proving import smallest_words
from tests.evidence.example_judge import judge
from tests.evidence.example_run import (
    BASE,
    HEAD,
    as_planned,
    example_claim,
    example_plan,
    example_policy,
    example_policy_set,
    example_samples,
    only,
    write_example,
)
from tests.evidence.tampering import edit_outcomes

NEW_HEAD = "c" * 40
TODAY = date(2026, 11, 29)
SMOKE = example_policy("smoke")
FAST = example_policy("fast_track")
Make = Callable[..., Submission]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A passing bundle of a plan; equal requests share one."""
    known: dict[str, Submission] = {}

    def make(
        policy: Policy = SMOKE, gpu: bool = False, scene: Any = "passing", name: str = "run", **changes: Any
    ) -> Submission:
        plan = example_plan(policy, scene, gpu=gpu, **changes)
        key = f"{plan.digest()} {scene} {name}"
        if key not in known:
            folder = write_example(tmp_path_factory.mktemp("gate") / name, plan, scene)
            known[key] = load_submission(folder, judge, as_planned)
        return known[key]

    return make


def _decide(*submissions: Submission, policy: Policy = SMOKE, **more: Any) -> Verdict:
    return decide(submissions, policy, today=TODAY, **more)


def _row(verdict: Verdict, stage: str, arch: str | None) -> Any:
    return next(r for r in verdict.rows if r.stage == stage and r.arch == arch)


def test_a_smoke_bundle_is_admitted_under_the_smoke_policy(made: Make) -> None:
    verdict = _decide(made())
    assert (verdict.answer, verdict.exit_code) == (Answer.ADMITTED, 0)
    assert verdict.missing == ()
    assert [(r.stage.value, r.arch) for r in verdict.rows] == [
        ("isolation", None), ("audit", "sm_90a"), ("audit", "sm_100a"), ("kernels", "cpu"),
        ("coverage", "cpu"), ("evals", "cpu"), ("sweep", "cpu"),
    ]  # fmt: skip
    assert all(row.controls == row.checks for row in verdict.rows)


def test_a_smoke_bundle_is_rejected_where_the_policy_asks_for_gpus(made: Make) -> None:
    verdict = _decide(made(FAST), policy=FAST)
    assert (verdict.answer, verdict.exit_code) == (Answer.REJECTED, 1)
    assert [(m.stage.value, m.arch, m.where) for m in verdict.missing] == [
        ("kernels", "sm_90a", "a machine with one sm_90a GPU"),
        ("coverage", "sm_90a", "a machine with one sm_90a GPU"),
        ("evals", "sm_90a", "a machine with one sm_90a GPU"),
        ("sweep", "sm_90a", "a machine with one sm_90a GPU"),
    ]
    assert verdict.missing[0].command == (
        f"fasttrack validate --pack k3_decode --policy fast_track --repo ../judged-aaaaaaaaaaaa "
        f"--base {BASE} --head {HEAD} --tier rank --stage kernels"
    )


def test_a_smoke_and_a_gpu_bundle_together_are_admitted(made: Make) -> None:
    verdict = _decide(made(FAST), made(FAST, gpu=True, name="h200"), policy=FAST)
    assert verdict.answer is Answer.ADMITTED
    assert _row(verdict, "kernels", "sm_90a").found_tier is Tier.RANK
    assert _row(verdict, "kernels", "cpu").found_tier is Tier.SMOKE


def test_compiled_architectures_need_an_audit_and_no_run(made: Make) -> None:
    verdict = _decide(made(FAST), made(FAST, gpu=True, name="h200"), policy=FAST)
    assert [r.stage.value for r in verdict.rows if r.arch == "sm_100a"] == ["audit"]


def test_no_bundle_cannot_be_judged() -> None:
    assert _decide().answer is Answer.COULD_NOT_JUDGE
    assert _decide().exit_code == 2


def test_a_broken_bundle_cannot_be_judged(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", example_plan(scene="passing"), "passing")
    (folder / "logs" / "compile.log").write_text("edited")
    verdict = _decide(load_submission(folder, judge, as_planned))
    assert verdict.exit_code == 2
    assert "logs/compile.log" in verdict.reasons[0]


def test_a_bundle_whose_outcomes_its_samples_do_not_give_cannot_be_judged(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", example_plan(), "mixed")

    def admit(outcome: Outcome) -> Outcome:
        is_pass = outcome.control is not None and outcome.control.failed
        return outcome.model_copy(update={"status": Status.PASS, "next_step": ""}) if is_pass else outcome

    edit_outcomes(folder, admit)
    assert _decide(load_submission(folder, judge, as_planned)).exit_code == 2


def test_an_incomplete_bundle_cannot_be_judged(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", example_plan(scene="passing"), "passing", stop_after=20)
    submission = load_submission(folder, judge, as_planned)
    assert submission.verification.state is BundleState.INCOMPLETE
    assert _decide(submission).exit_code == 2


def test_a_folder_that_is_no_bundle_cannot_be_judged(tmp_path: Path) -> None:
    assert _decide(load_submission(tmp_path, judge, as_planned)).exit_code == 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"claim": example_claim().model_copy(update={"summary": "another"})}, "different claims"),
        ({"change": {"repository": "https://github.com/other/vllm"}}, "different repositories"),
        ({"change": {"pr": 7}}, "different pull requests"),
        ({"pack_digest": "4" * 64}, "ran different pack files"),
        ({"change": {"head": NEW_HEAD}}, "different heads"),
    ],
)
def test_bundles_about_different_things_cannot_be_judged_together(
    made: Make, changes: dict[str, Any], word: str
) -> None:
    if isinstance(changes.get("change"), dict):
        changes = {"change": example_plan(scene="passing").change.model_copy(update=changes["change"])}
    verdict = _decide(made(), made(name="other", **changes))
    assert verdict.exit_code == 2
    assert word in verdict.reasons[0]


def test_a_bundle_of_another_pull_requests_head_is_stale_not_admitted(made: Make) -> None:
    verdict = _decide(made(), head=NEW_HEAD)
    assert verdict.exit_code == 1
    assert all(not row.is_met for row in verdict.rows)


def test_evidence_from_uncommitted_changes_is_refused(made: Make) -> None:
    change = example_plan(scene="passing").change.model_copy(update={"is_dirty": True})
    verdict = _decide(made(change=change))
    assert verdict.exit_code == 1
    assert "uncommitted changes" in verdict.reasons[0]
    assert verdict.bundles[0].refused != ""


def test_uncommitted_changes_are_refused_even_where_the_policy_lets_them_run(made: Make) -> None:
    policy = example_policy("smoke", is_dirty_allowed=True)
    change = example_plan(policy, "passing").change.model_copy(update={"is_dirty": True})
    assert _decide(made(policy, change=change), policy=policy).exit_code == 1


def test_evidence_under_another_policy_does_not_count(made: Make) -> None:
    verdict = _decide(made(), policy=FAST)
    assert verdict.exit_code == 1
    assert "another policy than 'fast_track' (its policy was 'smoke')" in verdict.reasons[0]
    softened = example_policy("smoke", min_path_share=0.5)
    verdict = _decide(made(softened), policy=SMOKE)
    assert "has another version of it" in verdict.reasons[0]


def test_a_policy_that_names_signers_counts_only_their_bundles(made: Make) -> None:
    policy = example_policy("smoke", signers=("5" * 64,))
    unsigned = made(policy)
    assert "unsigned" in _decide(unsigned, policy=policy).reasons[0]
    by_stranger = _signed(unsigned, "6" * 64)
    assert "signed by 6666" in _decide(by_stranger, policy=policy).reasons[0]
    assert _decide(_signed(unsigned, "5" * 64), policy=policy).answer is Answer.ADMITTED


def test_a_stage_that_nobody_ran_is_missing(made: Make) -> None:
    checks = only(example_plan(scene="passing"), lambda c: c.stage != "evals").checks
    verdict = _decide(made(checks=checks))
    assert [(m.stage.value, m.why) for m in verdict.missing] == [("evals", "no bundle has evidence on cpu")]


def test_an_architecture_without_an_audit_is_missing(made: Make) -> None:
    checks = only(example_plan(scene="passing"), lambda c: not c.id.endswith("/sm_100a")).checks
    verdict = _decide(made(checks=checks))
    assert [(m.stage.value, m.arch) for m in verdict.missing] == [("audit", "sm_100a")]


def test_evidence_below_the_tier_is_not_enough(made: Make) -> None:
    proofs = tuple(p.model_copy(update={"tier": Tier.NODE}) if p.stage == "sweep" else p for p in FAST.proofs)
    policy = example_policy("fast_track", proofs=proofs)
    verdict = _decide(made(policy), made(policy, gpu=True, name="h200"), policy=policy)
    assert [(m.stage.value, m.arch, m.why) for m in verdict.missing] == [
        ("sweep", "sm_90a", "6 checks passed below tier node")
    ]
    assert verdict.missing[0].where == "a machine with several sm_90a GPUs"


def test_a_subject_that_the_policy_names_must_be_there(made: Make) -> None:
    proofs = tuple(
        p.model_copy(update={"subjects": ("drift", "gpqa")}) if p.stage == "evals" else p
        for p in SMOKE.proofs
    )
    policy = example_policy("smoke", proofs=proofs)
    verdict = _decide(made(policy), policy=policy)
    assert [m.why for m in verdict.missing] == ["no check of gpqa"]


def test_every_required_check_must_pass_and_the_open_ones_are_named(made: Make) -> None:
    verdict = _decide(made(scene="mixed"))
    assert verdict.exit_code == 1
    missing = {(m.stage.value, m.arch): m for m in verdict.missing}
    assert missing["coverage", "cpu"].checks == ("coverage/poison/attn_res",)
    assert missing["coverage", "cpu"].why == "1 of 10 required checks did not pass (1 NO_EVIDENCE)"
    assert missing["audit", "sm_100a"].checks == ("audit/kda_step/sm_100a",)
    assert ("audit", "sm_90a") not in missing


def test_a_check_that_is_not_required_fails_nothing(made: Make) -> None:
    verdict = _decide(made())
    assert _row(verdict, "evals", "cpu").checks == 2  # the third is SKIPPED and not required


def test_the_strongest_tier_wins(made: Make) -> None:
    weak = made(FAST, name="weak", gpu=True, scene="mixed")
    strong = _retiered(made(FAST, gpu=True, name="strong"), Tier.NODE)
    weak_only_inconclusive = _with_statuses(weak, {Status.FAIL: Status.INCONCLUSIVE})
    verdict = _decide(made(FAST), weak_only_inconclusive, strong, policy=FAST)
    assert verdict.answer is Answer.ADMITTED
    assert _row(verdict, "kernels", "sm_90a").found_tier is Tier.NODE


def test_a_weaker_pass_does_not_cover_a_stronger_tiers_open_answer(made: Make) -> None:
    strong = _with_statuses(
        _retiered(made(FAST, gpu=True, scene="mixed", name="strong"), Tier.NODE),
        {Status.FAIL: Status.INCONCLUSIVE},
    )
    verdict = _decide(made(FAST), made(FAST, gpu=True, name="weak"), strong, policy=FAST)
    assert _row(verdict, "evals", "sm_90a").why == "1 of 2 required checks did not pass (1 INCONCLUSIVE)"


@pytest.mark.parametrize(
    ("gpus", "tier", "counts_as"),
    [
        (0, Tier.CLAIM, Tier.SMOKE),
        (1, Tier.NODE, Tier.RANK),
        (1, Tier.CLAIM, Tier.RANK),
        (2, Tier.CLAIM, Tier.NODE),
        (8, Tier.CLAIM, Tier.CLAIM),
        (8, Tier.SMOKE, Tier.SMOKE),
    ],
)
def test_evidence_counts_at_most_at_the_tier_that_its_machine_can_give(
    gpus: int, tier: Tier, counts_as: Tier
) -> None:
    plan = example_plan(FAST, gpu=True)
    machine = plan.machine.model_copy(update={"gpus": plan.machine.gpus * gpus})
    assert max(plan.claim.envelope.tp) == 8
    assert counted_tier(plan.model_copy(update={"machine": machine, "tier": tier})) is counts_as


def test_a_claim_that_is_not_the_one_in_force_admits_nothing(made: Make) -> None:
    mine = made()
    assert mine.plan is not None
    assert _decide(replace(mine, claim=mine.plan.claim)).answer is Answer.ADMITTED
    wider = mine.plan.claim.model_copy(update={"summary": "what the guard dispatches by"})
    verdict = _decide(replace(mine, claim=wider))
    assert verdict.exit_code == 1
    assert "its claim is not the one in force in pack k3_decode" in verdict.reasons[0]


def test_a_pass_in_one_bundle_and_a_fail_in_another_contradict_and_fail(made: Make) -> None:
    verdict = _decide(made(), made(scene="mixed", name="other"))
    assert verdict.exit_code == 1
    spill = next(c for c in verdict.contradictions if c.check == "audit/kda_step/sm_100a")
    assert spill.contributions == (
        Contribution(bundle="run", tier=Tier.SMOKE, status=Status.PASS),
        Contribution(bundle="other", tier=Tier.SMOKE, status=Status.FAIL),
    )
    assert "passes in one bundle and fails in another" in verdict.reasons[0]


def test_a_pass_beside_an_open_answer_of_the_same_tier_is_no_contradiction(made: Make) -> None:
    again = _with_statuses(made(scene="mixed", name="other"), {Status.FAIL: Status.INCONCLUSIVE})
    verdict = _decide(made(), again)
    assert verdict.contradictions == ()
    assert verdict.answer is Answer.ADMITTED


def test_the_same_check_on_two_architectures_is_two_proofs(made: Make) -> None:
    verdict = _decide(made(FAST), made(FAST, gpu=True, scene="mixed", name="h200"), policy=FAST)
    clashes = {c.check for c in verdict.contradictions}
    assert "coverage/poison/attn_res" not in clashes
    assert _row(verdict, "coverage", "cpu").is_met
    assert not _row(verdict, "coverage", "sm_90a").is_met


def _stripped(plan: Plan, *left_out: str) -> Plan:
    """The plan as somebody else's harness would have made it, had it asked less."""
    kept = only(plan, lambda c: not any(part in c.id for part in left_out))
    return kept.model_copy(update={"harness_digest": "f" * 64})


def _whole(plan: Plan) -> Replanned:
    """What the gate's own planner asks, whatever the plan does."""
    return Replanned("1" * 64, "2" * 64, example_plan(plan.policy, "passing").checks)


def test_a_bundle_whose_plan_was_not_made_again_counts_for_nothing(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", example_plan(scene="passing"), "passing")
    for planner, why in (
        (None, "no planner was given"),
        (lambda plan: Replanned("1" * 64, None, None, "no pack is called x"), "no pack is called x"),
    ):
        verdict = _decide(load_submission(folder, judge, planner))
        assert verdict.exit_code == 1
        assert "its plan could not be made again, so nothing shows that it asks all" in verdict.reasons[0]
        assert why in verdict.reasons[0]
        assert all(row.checks == 0 for row in verdict.rows)


def test_a_plan_stripped_of_checks_is_rejected_whatever_harness_it_names(tmp_path: Path) -> None:
    plan = _stripped(example_plan(scene="passing"), "kernels/router", "audit/kda_step/sm_100a")
    folder = write_example(tmp_path / "run", plan, "passing")
    verdict = _decide(load_submission(folder, judge, _whole))
    assert verdict.exit_code == 1
    assert [(m.stage.value, m.arch) for m in verdict.missing] == [("audit", "sm_100a"), ("kernels", "cpu")]
    assert verdict.missing[0].checks == ("audit/kda_step/sm_100a",)
    assert verdict.missing[1].why == (
        "3 checks that this gate asks are answered by no bundle, first "
        "kernels/router/cpu.tp1.dcp1.b1.c64.d0.bf16.decode: left out of the plan (run)"
    )
    assert verdict.bundles[0].note.startswith(
        "made with harness ffffffffffff, and this gate is 111111111111: 4 checks are planned and 0 judged "
        "otherwise here; only what is asked alike counts"
    )
    assert f"--base {BASE} --head {HEAD} --tier smoke` with this gate's version" in verdict.bundles[0].note


@pytest.mark.parametrize(
    "changes",
    [
        {"is_required": False},
        {"thresholds": ()},
        {"parameters": (("kind", "path"), ("seed", 1))},
        {"cell": None},
        {"tier": Tier.CLAIM},
    ],
)
def test_a_check_that_asks_something_else_under_its_own_name_does_not_count(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plan = example_plan(scene="passing")
    name = "coverage/path/cpu.tp1.dcp1.b1.c64.d0.bf16.decode"
    checks = tuple(c.model_copy(update=changes) if c.id == name else c for c in plan.checks)
    foreign = plan.model_copy(update={"checks": checks, "harness_digest": "f" * 64})

    def lenient(check: Check, samples: Samples) -> Outcome:
        return judge(next(c for c in plan.checks if c.id == check.id), samples)

    folder = write_example(tmp_path / "run", foreign, "passing", judged_by=lenient)
    verdict = _decide(load_submission(folder, lenient, _whole))
    assert verdict.exit_code == 1
    assert [m.checks for m in verdict.missing] == [(name,)]
    assert "planned as another question (run)" in verdict.missing[0].why


def test_an_older_harness_that_asked_and_judged_alike_is_admitted_and_named(made: Make) -> None:
    older = made(harness_digest="e" * 64)
    verdict = _decide(older)
    assert verdict.answer is Answer.ADMITTED
    assert (verdict.bundles[0].harness, verdict.bundles[0].note) == ("e" * 64, "")


def test_what_one_bundle_leaves_out_another_may_answer(made: Make, tmp_path: Path) -> None:
    plan = _stripped(example_plan(scene="passing"), "kernels/router")
    part = load_submission(write_example(tmp_path / "part", plan, "passing"), judge, _whole)
    verdict = _decide(part, made(name="whole"))
    assert verdict.answer is Answer.ADMITTED
    assert verdict.reasons[0].startswith("all 7 proofs")


def test_the_gate_takes_its_own_judgement_over_the_stored_one(tmp_path: Path) -> None:
    plan = example_plan(harness_digest="f" * 64)
    folder = write_example(tmp_path / "run", plan, "mixed")

    def admit(outcome: Outcome) -> Outcome:
        is_pass = outcome.control is not None and outcome.control.failed
        return outcome.model_copy(update={"status": Status.PASS, "next_step": ""}) if is_pass else outcome

    edit_outcomes(folder, admit)
    submission = load_submission(folder, judge, lambda p: Replanned("1" * 64, "2" * 64, p.checks))
    verdict = _decide(submission)
    assert verdict.exit_code == 1
    assert dict(_row(verdict, "audit", "sm_100a").statuses) == {Status.PASS: 2, Status.FAIL: 1}
    assert "0 checks are planned and 5 judged otherwise here" in verdict.bundles[0].note


@pytest.mark.parametrize("part", ["zones", "rules"])
def test_isolation_judged_by_other_zones_or_rules_does_not_count(made: Make, part: str) -> None:
    mine = example_policy_set()
    assert decide([made()], mine, today=TODAY).answer is Answer.ADMITTED
    others = {
        "zones": mine.zones.model_copy(update={"zones": mine.zones.zones[:1]}),
        "rules": load_rules()[:1],
    }
    verdict = decide([made()], mine._replace(**{part: others[part]}), today=TODAY)
    assert [m.stage.value for m in verdict.missing] == ["isolation"]
    assert "judged by other zones or rules than this gate's (run)" in verdict.missing[0].why


def test_a_rerun_names_an_op_where_all_of_it_is_open_and_checks_where_some_are() -> None:
    asked = [c for c in example_plan(scene="passing").checks if c.stage == "kernels"]
    kda = [c for c in asked if c.op == "kda_step"]
    router = [c for c in asked if c.op == "router"]
    assert smallest_words([*kda, router[1]], asked) == ("kda_step", router[1].id)
    assert smallest_words(asked, asked) == ()
    assert smallest_words([], asked) == ()


def test_a_rerun_of_more_checks_than_a_command_should_name_is_the_whole_stage() -> None:
    asked = [c for c in example_plan(scene="passing").checks if c.stage == "kernels"]
    two_of_each = [c for c in asked if c.cell is not None and c.cell.batch == 1]
    assert len(two_of_each) == 10
    assert smallest_words(two_of_each, asked) == ()
    assert len(smallest_words(two_of_each[:8], asked)) == 8


def test_a_narrowed_bundle_answers_its_part_and_the_gate_asks_for_the_rest(
    made: Make, tmp_path: Path
) -> None:
    whole = example_plan(scene="passing")
    plan = only(whole, lambda c: c.op == "router").model_copy(update={"only": ("router",)})

    def again(made_plan: Plan) -> Replanned:
        stages = {c.stage for c in made_plan.checks}
        return Replanned("1" * 64, "2" * 64, tuple(c for c in whole.checks if c.stage in stages))

    part = load_submission(write_example(tmp_path / "part", plan, "passing"), judge, again)
    assert part.verification.state is BundleState.VERIFIED
    alone = _decide(part)
    assert _row(alone, "kernels", "cpu").why.startswith("12 checks that this gate asks are answered by no")
    failing = made(scene="mixed", name="first")
    assert not _row(_decide(failing), "kernels", "cpu").is_met
    open_before = _with_statuses(failing, {Status.FAIL: Status.SKIPPED})
    row = _row(_decide(open_before, part), "kernels", "cpu")
    assert row.why == "1 of 15 required checks did not pass (1 SKIPPED)"  # experts, which nobody ran again


def _ops_of_file(path: str) -> tuple[str, ...]:
    return ("kda_step",) if path.endswith("kda_step.py") else ()


def _moved(*paths: str) -> dict[Sha, Move]:
    return {HEAD: Move(paths, "kernels/k3_decode/", _ops_of_file)}


def test_a_new_head_that_changes_one_op_makes_its_evidence_stale(made: Make) -> None:
    verdict = _decide(made(), head=NEW_HEAD, moves=_moved("kernels/k3_decode/cute/kda_step.py"))
    stale = {s.check for s in verdict.stale}
    assert "kernels/kda_step/cpu.tp1.dcp1.b1.c64.d0.bf16.decode" in stale
    assert "audit/kda_step/sm_90a" in stale
    assert "coverage/poison/kda_step" in stale
    assert "evals/drift/canary" in stale
    assert "isolation/zones/change" in stale
    assert not any("router" in check for check in stale)
    assert _row(verdict, "kernels", "cpu").stale == 3
    cells = {s.check: s.cell for s in verdict.stale}
    assert cells["coverage/poison/kda_step"] == "cpu.tp1.dcp1.b1.c64.d0.bf16.decode"
    assert cells["isolation/zones/change"] is None
    kernels = next(m for m in verdict.missing if m.stage == "kernels")
    assert kernels.command.endswith("--stage kernels --only kda_step")
    assert _row(verdict, "audit", "sm_90a").passed == 2


def test_a_new_head_that_touches_only_prose_and_tests_leaves_all_but_isolation_fresh(made: Make) -> None:
    verdict = _decide(made(), head=NEW_HEAD, moves=_moved("README.md", "tests/test_x.py"))
    assert {s.check.split("/")[0] for s in verdict.stale} == {"isolation"}


def test_a_text_file_may_decide_what_runs(made: Make) -> None:
    verdict = _decide(made(), head=NEW_HEAD, moves=_moved("requirements/cuda.txt"))
    assert "kernels/kda_step/cpu.tp1.dcp1.b1.c64.d0.bf16.decode" in {s.check for s in verdict.stale}


def test_a_change_without_a_file_proves_nothing_of_the_head(made: Make) -> None:
    change = example_plan(scene="passing").change.model_copy(update={"base": HEAD, "files": ()})
    verdict = _decide(made(change=change))
    assert verdict.answer is Answer.REJECTED
    assert "has no changed file, so isolation had nothing to judge" in verdict.reasons[0]


def test_bundles_of_one_head_with_different_bases_are_not_merged(made: Make) -> None:
    change = example_plan(scene="passing").change.model_copy(update={"base": NEW_HEAD})
    verdict = _decide(made(), made(name="other", change=change))
    assert verdict.answer is Answer.COULD_NOT_JUDGE
    assert "from different bases" in verdict.reasons[0]


def test_a_bundle_of_another_pack_version_says_so_even_where_all_is_asked_alike(made: Make) -> None:
    bundle = replace(made(), has_other_pack=True)
    verdict = _decide(bundle)
    assert verdict.answer is Answer.ADMITTED
    assert "another version of pack k3_decode than is here" in verdict.bundles[0].note
    assert verdict.bundles[0].base == example_plan(scene="passing").change.base


def test_a_new_head_that_changes_code_outside_the_pack_ends_what_ran_but_not_the_audit(made: Make) -> None:
    verdict = _decide(made(), head=NEW_HEAD, moves=_moved("vllm/model_executor/layers/x.py"))
    assert [m.stage.value for m in verdict.missing] == ["isolation", "kernels", "coverage", "evals", "sweep"]


def test_fresh_evidence_beside_stale_evidence_is_enough(made: Make) -> None:
    change = example_plan(scene="passing").change.model_copy(update={"head": NEW_HEAD})
    fresh = made(name="fresh", change=change)
    verdict = _decide(made(), fresh, head=NEW_HEAD)
    assert verdict.answer is Answer.ADMITTED
    assert verdict.stale == ()


def test_waivers_are_printed_with_what_they_cover(made: Make) -> None:
    waiver = _decide(made()).waivers[0]
    assert (waiver.rule, waiver.owner, waiver.findings, waiver.is_expired) == (
        "new_dependency",
        "gatekeeper",
        1,
        False,
    )


def test_a_finding_whose_waiver_has_lapsed_is_a_finding_again(made: Make) -> None:
    verdict = decide([made()], SMOKE, today=date(2027, 7, 1))
    assert verdict.exit_code == 1
    assert "was waived, and no waiver in force covers it any more" in verdict.reasons[0]
    assert verdict.waivers[0].is_expired


def test_a_finding_that_claims_a_waiver_the_policy_does_not_have_is_not_waived(tmp_path: Path) -> None:
    finding = Finding(
        rule="zones", severity=Severity.ERROR, message="x", path="vllm/x.py", waived="me: trust me"
    )

    def samples(check: Check) -> Samples:
        taken = example_samples(check, Tier.SMOKE, "passing")
        is_zones = check.id == "isolation/zones/change"
        return taken.model_copy(update={"findings": (finding,)}) if is_zones else taken

    folder = write_example(tmp_path / "run", example_plan(scene="passing"), samples=samples)
    verdict = _decide(load_submission(folder, judge, as_planned))
    assert verdict.exit_code == 1
    assert "zones at vllm/x.py was waived" in verdict.reasons[0]


def test_a_policy_without_required_proofs_admits_nothing(made: Make) -> None:
    policy = example_policy("smoke", proofs=(Proof(stage=StageName.SWEEP, is_required=False),))
    checks = only(example_plan(scene="passing"), lambda c: c.stage == "sweep").checks
    verdict = _decide(made(policy, checks=checks), policy=policy)
    assert verdict.exit_code == 1
    assert "demands no proof" in verdict.reasons[0]


def test_a_verdict_that_admits_with_something_missing_cannot_be_built(made: Make) -> None:
    rejected = _decide(made(scene="mixed"))
    with pytest.raises(ValueError, match="admitted needs"):
        Verdict.model_validate({**rejected.model_dump(), "answer": "admitted", "exit_code": 0})
    with pytest.raises(ValueError, match="has exit code"):
        Verdict.model_validate({**rejected.model_dump(), "exit_code": 0})


def test_ten_bundles_are_decided_in_under_a_second(made: Make) -> None:
    one = made()
    bundles = [Submission(f"run{i}", one.verification, one.plan, one.outcomes, one.asked) for i in range(10)]
    begun = time.process_time()
    assert decide(bundles, SMOKE, today=TODAY).answer is Answer.ADMITTED
    assert time.process_time() - begun < 1.0


def _signed(submission: Submission, signer: str) -> Submission:
    verification = submission.verification.model_copy(update={"signer": signer})
    return Submission(submission.name, verification, submission.plan, submission.outcomes, submission.asked)


def _retiered(submission: Submission, tier: Tier) -> Submission:
    """As if a machine with two of its GPUs had made it."""
    assert submission.plan is not None
    machine = submission.plan.machine
    doubled = machine.model_copy(update={"gpus": machine.gpus * 2})
    plan = submission.plan.model_copy(update={"tier": tier, "machine": doubled})
    outcomes = tuple(o.model_copy(update={"tier": tier}) for o in submission.outcomes)
    return Submission(submission.name, submission.verification, plan, outcomes, submission.asked)


def _with_statuses(submission: Submission, changes: dict[Status, Status]) -> Submission:
    outcomes = tuple(
        o.model_copy(update={"status": changes.get(o.status, o.status)}) for o in submission.outcomes
    )
    return Submission(submission.name, submission.verification, submission.plan, outcomes, submission.asked)
