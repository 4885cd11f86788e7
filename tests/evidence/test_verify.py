"""Verifying: what breaks a bundle, step by step."""

import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.domain.bundle import BundleState, Environment, Manifest, Verification
from harness.domain.check import Check, Figure, Outcome, Samples, SampleTable, Status, Threshold
from harness.domain.machine import Gpu, Tier
from harness.domain.plan import Plan
from harness.domain.record import canonical_bytes, sha256_hex
from harness.evidence.bundle import write_bundle
from harness.evidence.consistency import has_planned_gpus
from harness.evidence.names import samples_folder
from harness.evidence.replanning import is_same_question
from harness.evidence.run_folder import open_run
from harness.evidence.strict_json import parse_record
from harness.evidence.verify import Replanned, conclusion, verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_plan, only, write_example
from tests.evidence.tampering import edit_outcomes, rebind_samples, rehash, said

ROUTER = "kernels/router/cpu.tp1.dcp1.b64.c512.d0.bf16.decode"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return only(example_plan(), lambda c: c.stage in ("isolation", "kernels", "evals"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Path:
    return write_example(tmp_path_factory.mktemp("pristine") / "bundle", plan)


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "bundle"))


def _broken(folder: Path) -> str:
    result = verify(folder, judge)
    assert result.state is BundleState.BROKEN
    return said(result)


def _step(result: Verification, name: str) -> str:
    return next(str([p.message for p in s.problems]) for s in result.steps if s.name == name)


def test_an_honest_bundle_verifies_and_is_rederived(pristine: Path) -> None:
    result = verify(pristine, judge)
    assert (result.state, result.is_rederived, result.signer) == (BundleState.VERIFIED, True, None)
    assert [s.name for s in result.steps] == [
        "tree", "manifest", "listing", "digests", "schemas", "binding", "planning", "outcomes", "samples",
        "rederivation", "attestation",
    ]  # fmt: skip


def test_without_a_judge_the_result_says_that_nothing_was_rederived(pristine: Path) -> None:
    result = verify(pristine)
    assert (result.state, result.is_rederived) == (BundleState.VERIFIED, False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    kept = ("audit/attn_res/sm_90a", "kernels/experts/cpu.tp1.dcp1.b1.c64.d0.bf16.decode")
    return write_example(tmp_path / "small", only(example_plan(), lambda c: c.id in kept))


def test_changing_one_byte_of_any_file_fails_verification_and_names_the_file(small: Path) -> None:
    for path in sorted(p for p in small.rglob("*") if p.is_file() and p.name != "manifest.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert path.relative_to(small).as_posix() in _broken(small)
        path.write_bytes(content)


def test_cutting_any_file_short_fails_verification_and_names_the_file(small: Path) -> None:
    for path in sorted(p for p in small.rglob("*") if p.is_file()):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert path.relative_to(small).as_posix() in _broken(small)
        path.write_bytes(content)


def test_a_file_that_the_manifest_does_not_list_is_named(bundle: Path) -> None:
    (bundle / "logs" / "extra.log").write_text("x")
    assert "logs/extra.log: is not listed" in _broken(bundle)


def test_a_listed_file_that_is_gone_is_named(bundle: Path) -> None:
    (bundle / "logs" / "compile.log").unlink()
    assert "logs/compile.log: is listed in the manifest but not there" in _broken(bundle)


def test_a_listed_file_in_a_place_of_its_own_is_refused(bundle: Path) -> None:
    (bundle / "report.html").write_text("x")
    rehash(bundle)
    assert "report.html: lies where bundles hold nothing" in _broken(bundle)


def _symlink(bundle: Path) -> None:
    (bundle / "logs" / "x").symlink_to("/etc/passwd")


def _folder_link(bundle: Path) -> None:
    shutil.move(bundle / "logs", bundle.parent / "elsewhere")
    (bundle / "logs").symlink_to(bundle.parent / "elsewhere")


def _hard_link(bundle: Path) -> None:
    os.link(bundle / "plan.json", bundle.parent / "other-name")


def _pipe(bundle: Path) -> None:
    os.mkfifo(bundle / "logs" / "pipe")


def _case(bundle: Path) -> None:
    (bundle / "logs" / "Compile.log").write_text("x")
    rehash(bundle)


def _unicode(bundle: Path) -> None:
    (bundle / "logs" / "cafe\u0301.log").write_text("x")


def _not_utf8(bundle: Path) -> None:
    (Path(os.fsdecode(os.fsencode(bundle) + b"/logs/\xff.log"))).write_text("x")


def _deep(bundle: Path) -> None:
    (bundle / "logs" / "/".join("abcdefghij")).mkdir(parents=True)
    (bundle / "logs" / "/".join("abcdefghij") / "x").write_text("x")


@pytest.mark.parametrize(
    ("plant", "word"),
    [
        (_symlink, "logs/x: is a link"),
        (_folder_link, "logs: is a link"),
        (_hard_link, "plan.json: is a hard link"),
        (_pipe, "logs/pipe: is a link, a device, a pipe"),
        (_case, "is the same file as"),
        (_unicode, "a character"),
        (_not_utf8, "a character"),
        (_deep, "deeper than"),
    ],
)
def test_a_tree_that_is_not_safe_to_read_stops_verification(
    bundle: Path, plant: Callable[[Path], None], word: str
) -> None:
    plant(bundle)
    result = verify(bundle, judge)
    assert result.state is BundleState.BROKEN
    assert word in said(result)
    assert all(s.skipped for s in result.steps[1:])


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("../../etc/passwd", "is listed but leaves or repeats a folder"),
        ("+/../plan.json", "is listed but leaves or repeats a folder"),
        ("/etc/passwd", "manifest.json: is no Manifest"),
        ("manifest.json", "sorted by path"),
    ],
)
def test_a_manifest_that_lists_a_path_outside_is_refused(bundle: Path, path: str, word: str) -> None:
    raw = (bundle / "manifest.json").read_bytes()
    (bundle / "manifest.json").write_bytes(raw.replace(b'"environment.json"', f'"{path}"'.encode()))
    assert word in _broken(bundle)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b'"schema_version":1,"tier"', b'"schema_version":2,"tier"', "schema version 2"),
        (b'"size":', b'"size":NaN,"size":', "JSON"),
        (b'{"change"', b'{ "change"', "canonical"),
        (b'"tier":"smoke"', b'"tier":"godlike"', "Manifest"),
        (b'"tier":"smoke"', b'"tier":"claim"', "tier is not the plan's"),
    ],
)
def test_an_edited_manifest_is_refused(bundle: Path, old: bytes, new: bytes, word: str) -> None:
    raw = (bundle / "manifest.json").read_bytes()
    assert old in raw
    (bundle / "manifest.json").write_bytes(raw.replace(old, new, 1))
    assert word in _broken(bundle)


def test_an_edited_status_with_a_rehashed_manifest_is_noticed(bundle: Path) -> None:
    def admit(outcome: Outcome) -> Outcome:
        if outcome.check != ROUTER:
            return outcome
        return outcome.model_copy(update={"status": Status.PASS, "next_step": ""})

    edit_outcomes(bundle, admit)
    result = verify(bundle, judge)
    assert "status is PASS, the samples give FAIL" in _step(result, "rederivation")
    assert not result.is_rederived


def test_an_edited_figure_with_a_rehashed_manifest_is_noticed(bundle: Path) -> None:
    def shrink(outcome: Outcome) -> Outcome:
        figures = tuple(
            Figure(name=f.name, value=f.value / 2) if f.name == "optimised_relative_l2" and f.value else f
            for f in outcome.figures
        )
        return outcome.model_copy(update={"figures": figures})

    edit_outcomes(bundle, shrink)
    assert "figure optimised_relative_l2.value" in _step(verify(bundle, judge), "rederivation")


def test_a_failure_turned_into_skipped_without_samples_is_noticed(bundle: Path) -> None:
    def skip(outcome: Outcome) -> Outcome:
        if outcome.check != "isolation/zones/change":
            return outcome
        return Outcome(
            check=outcome.check, status=Status.SKIPPED, tier=outcome.tier, summary="x", next_step="x"
        )

    edit_outcomes(bundle, skip)
    shutil.rmtree(bundle / samples_folder("isolation/zones/change"))
    rehash(bundle)
    assert "no earlier stage stopped the run" in _broken(bundle)


def test_an_outcome_without_its_samples_is_refused(bundle: Path) -> None:
    shutil.rmtree(bundle / samples_folder(ROUTER))
    rehash(bundle)
    assert f"{ROUTER}: is FAIL but has no samples" in _broken(bundle)


def test_samples_swapped_between_two_checks_are_noticed(bundle: Path) -> None:
    good = samples_folder("kernels/attn_res/cpu.tp1.dcp1.b64.c512.d0.bf16.decode")
    shutil.rmtree(bundle / samples_folder(ROUTER))
    shutil.copytree(bundle / good, bundle / samples_folder(ROUTER))
    rehash(bundle)
    assert "holds the samples of kernels/attn_res" in _broken(bundle)


def test_a_table_swapped_between_two_valid_bundles_is_noticed(bundle: Path, tmp_path: Path) -> None:
    plan = only(example_plan(scene="passing"), lambda c: c.stage in ("isolation", "kernels", "evals"))
    other = write_example(tmp_path / "other", plan, "passing")
    table = f"{samples_folder(ROUTER)}/errors.parquet"
    shutil.copyfile(other / table, bundle / table)
    rehash(bundle)
    assert "the samples give PASS" in _broken(bundle)


def test_samples_of_another_valid_bundle_are_noticed_though_they_are_judged_alike(
    bundle: Path, tmp_path: Path, plan: Plan
) -> None:
    other = write_example(tmp_path / "other", plan.model_copy(update={"nonce": "e" * 16}))
    place = samples_folder(ROUTER)
    shutil.rmtree(bundle / place)
    shutil.copytree(other / place, bundle / place)
    rehash(bundle)
    result = verify(bundle, judge)
    assert result.state is BundleState.BROKEN
    other_plan = sha256_hex((other / "plan.json").read_bytes())
    assert said(result) == f"{ROUTER}: its samples answer another plan ({other_plan[:12]})"


def test_samples_that_name_no_plan_are_broken_by_the_code_that_names_it_and_else_unconfirmed(
    bundle: Path,
) -> None:
    rebind_samples(bundle, None)
    own = verify(bundle, judge, as_planned)
    other = verify(bundle, judge, lambda plan: Replanned("9" * 64, plan.pack_digest, plan.checks))
    assert (own.state, other.state) == (BundleState.BROKEN, BundleState.UNCONFIRMED)
    assert f"{ROUTER}: its samples name no plan" in said(own)
    assert f"{ROUTER}: its samples name no plan" in said(other)
    assert (other.is_replanned, other.is_rederived) == (True, False)


def test_an_outcome_left_out_makes_the_bundle_incomplete(bundle: Path) -> None:
    edit_outcomes(bundle, lambda o: None if o.check == ROUTER else o)
    shutil.rmtree(bundle / samples_folder(ROUTER))
    rehash(bundle)
    result = verify(bundle, judge)
    assert result.state is BundleState.INCOMPLETE
    assert said(result) == f"{ROUTER}: is planned and has no outcome"


def test_an_outcome_twice_or_out_of_order_or_unplanned_is_refused(bundle: Path) -> None:
    lines = (bundle / "outcomes.jsonl").read_bytes().splitlines(keepends=True)
    (bundle / "outcomes.jsonl").write_bytes(b"".join([lines[1], lines[0], lines[0], *lines[2:]]))
    rehash(bundle)
    words = _broken(bundle)
    assert "has two outcomes" in words
    assert "not in plan order" in words
    edit_outcomes(bundle, lambda o: o.model_copy(update={"check": "kernels/x/y"}) if o.check == ROUTER else o)
    assert "kernels/x/y: has an outcome but is not in the plan" in _broken(bundle)


def test_an_outcome_of_a_stronger_tier_than_its_run_is_refused(bundle: Path) -> None:
    edit_outcomes(bundle, lambda o: o.model_copy(update={"tier": Tier.CLAIM}))
    assert "is of tier claim, the plan of smoke" in _broken(bundle)


def test_samples_of_no_outcome_are_refused(bundle: Path) -> None:
    shutil.copytree(bundle / samples_folder(ROUTER), bundle / "samples" / "kernels~more")
    rehash(bundle)
    assert "samples/kernels~more: holds samples of no outcome" in _broken(bundle)


def test_a_plan_from_another_run_is_refused(bundle: Path, plan: Plan) -> None:
    (bundle / "plan.json").write_bytes(plan.model_copy(update={"nonce": "f" * 16}).canonical())
    rehash(bundle)
    assert "plan_digest is not the plan's" in _broken(bundle)


def _rewritten(bundle: Path, plan: Plan) -> None:
    """Put another plan in, with a manifest that fits it."""
    manifest = parse_record((bundle / "manifest.json").read_bytes(), Manifest)
    again = Manifest.of(plan, manifest.machine, manifest.files, manifest.created)
    (bundle / "plan.json").write_bytes(plan.canonical())
    (bundle / "manifest.json").write_bytes(again.canonical())
    rebind_samples(bundle, plan.digest())


def test_a_threshold_that_the_policy_does_not_set_is_refused(bundle: Path, plan: Plan) -> None:
    proofs = tuple(
        p.model_copy(update={"thresholds": (("margin", 0.01),)}) if p.stage == "evals" else p
        for p in plan.policy.proofs
    )
    policy = plan.policy.model_copy(update={"proofs": proofs})
    _rewritten(bundle, plan.model_copy(update={"policy": policy}))
    assert "threshold margin is not the policy's" in _broken(bundle)


def _whole_and_strict(made: Plan) -> Replanned:
    """The planner of the harness that made the example: all checks, and a margin of its own."""
    checks = (
        c.model_copy(update={"thresholds": (Threshold(name="margin", value=0.01),)})
        if c.stage == "evals"
        else c
        for c in example_plan().checks
    )
    return Replanned("1" * 64, "2" * 64, tuple(checks))


def test_a_plan_that_leaves_out_or_softens_what_the_claim_calls_for_is_refused(
    bundle: Path, plan: Plan
) -> None:
    result = verify(bundle, judge, _whole_and_strict)
    words = said(result)
    assert (result.state, result.is_replanned) == (BundleState.BROKEN, False)
    assert "audit/attn_res/sm_90a: is called for by claim and policy, but the plan leaves it out" in words
    assert "evals/drift/canary: asks another question" in words


def test_a_plan_that_could_not_be_made_again_is_said_so(bundle: Path) -> None:
    result = verify(bundle, judge, lambda plan: Replanned("9" * 64, None, None, "no pack is called x"))
    assert (result.state, result.is_replanned) == (BundleState.UNCONFIRMED, False)
    assert _step(result, "planning") == "[]"
    assert said(result) == "plan.json: could not be made again: no pack is called x"


def test_without_a_planner_the_result_says_that_nothing_was_planned_again(bundle: Path) -> None:
    result = verify(bundle, judge)
    assert (result.is_replanned, result.made_with, result.verified_with) == (False, "1" * 64, None)
    assert result.steps[6].skipped == "no planner was given"


def test_a_stripped_plan_is_not_verified_by_naming_another_harness(bundle: Path, plan: Plan) -> None:
    _rewritten(bundle, plan.model_copy(update={"harness_digest": "f" * 64}))
    result = verify(bundle, judge, _whole_and_strict)
    assert (result.state, result.is_replanned) == (BundleState.UNCONFIRMED, False)
    assert "audit/attn_res/sm_90a: is called for by claim and policy, but the plan leaves it out" in said(
        result
    )
    assert conclusion(result).startswith(
        "unconfirmed: its files hold together, but it was made with harness ffffffffffff, and this is "
        "111111111111"
    )


def test_a_plan_that_was_narrowed_on_purpose_verifies_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    narrow = only(example_plan(), lambda c: c.op == "router").model_copy(update={"only": ("router",)})
    folder = write_example(tmp_path / "narrow", narrow)

    def replan(made: Plan) -> Replanned:
        return Replanned(made.harness_digest, made.pack_digest, example_plan().checks)

    result = verify(folder, judge, replan)
    assert (result.state, result.is_replanned) == (BundleState.VERIFIED, True)
    assert result.steps[6].note == "narrowed to router: 40 checks left out"
    _rewritten(folder, only(narrow, lambda c: c.stage == "coverage"))
    assert "kernels/router" in said(verify(folder, judge, replan))


def test_a_plan_that_another_harness_made_alike_is_verified_and_names_both(bundle: Path) -> None:
    result = verify(bundle, judge, lambda plan: Replanned("9" * 64, plan.pack_digest, plan.checks))
    assert (result.state, result.is_replanned) == (BundleState.VERIFIED, True)
    assert result.steps[6].note == "made with harness 111111111111; planned again with 999999999999"


def test_an_outcome_that_another_harness_judges_otherwise_is_not_verified(bundle: Path) -> None:
    def praise(outcome: Outcome) -> Outcome:
        return (
            outcome.model_copy(update={"summary": "nothing to see"}) if outcome.check == ROUTER else outcome
        )

    edit_outcomes(bundle, praise)
    other = verify(bundle, judge, lambda plan: Replanned("9" * 64, plan.pack_digest, plan.checks))
    assert (other.state, other.is_rederived) == (BundleState.UNCONFIRMED, False)
    assert f"{ROUTER}: summary says" in said(other)
    assert verify(bundle, judge, as_planned).state is BundleState.BROKEN


def test_a_bundle_from_before_a_field_was_added_to_its_plan_still_verifies(bundle: Path) -> None:
    older = json.loads((bundle / "plan.json").read_bytes())
    del older["is_full"], older["claim"]["speed"], older["policy"]["is_dirty_allowed"]
    raw = canonical_bytes(older)
    (bundle / "plan.json").write_bytes(raw)
    manifest = parse_record((bundle / "manifest.json").read_bytes(), Manifest)
    digests = {
        "plan_digest": sha256_hex(raw),
        "claim_digest": sha256_hex(canonical_bytes(older["claim"])),
        "policy_digest": sha256_hex(canonical_bytes(older["policy"])),
    }
    (bundle / "manifest.json").write_bytes(manifest.model_copy(update=digests).canonical())
    rebind_samples(bundle, digests["plan_digest"])
    assert said(verify(bundle, judge, as_planned)) == ""


def test_a_waiver_that_has_ended_since_is_no_other_question_and_an_invented_one_is(plan: Plan) -> None:
    (check,) = (c for c in plan.checks if c.id == ROUTER)
    policy = plan.policy
    held = Threshold(name="waived.new_dependency", value=policy.waivers[0].words())
    forged = Threshold(name="waived.spill", value=policy.waivers[0].words())
    assert is_same_question(check.model_copy(update={"thresholds": (held,)}), check, policy)
    assert not is_same_question(check.model_copy(update={"thresholds": (forged,)}), check, policy)


def test_costs_and_what_a_machine_cannot_run_are_no_other_question(bundle: Path, plan: Plan) -> None:
    def replan(made: Plan) -> Replanned:
        checks = (c.model_copy(update={"cost_s": 9.0, "unavailable": "no GPU"}) for c in made.checks)
        return Replanned(made.harness_digest, made.pack_digest, tuple(checks))

    assert verify(bundle, judge, replan).state is BundleState.VERIFIED


def test_a_plan_for_one_gpu_may_run_beside_a_second_and_on_no_other_kind() -> None:
    h200, b200 = (Gpu(name=name, arch="sm_90a", memory_bytes=1) for name in ("NVIDIA H200", "NVIDIA B200"))
    assert has_planned_gpus((h200,), (h200, h200))
    assert not has_planned_gpus((h200, h200), (h200,))
    assert not has_planned_gpus((h200,), (b200, h200))
    assert not has_planned_gpus((), (h200,))


def test_forged_samples_that_break_a_judge_are_a_problem_not_a_crash(bundle: Path) -> None:
    def brittle(check: Check, samples: Samples) -> Outcome:
        raise KeyError("column")

    assert "cannot be judged again: KeyError" in said(verify(bundle, brittle))


def test_what_problems_say_can_only_be_read(bundle: Path) -> None:
    (bundle / "logs" / "\x1b[2J\u202eevil").write_text("x")
    assert "\x1b" not in said(verify(bundle, judge))
    assert "\u202e" not in said(verify(bundle, judge))


def test_a_folder_that_is_no_bundle_is_broken_or_empty(tmp_path: Path) -> None:
    assert verify(tmp_path / "nothing").state is BundleState.BROKEN
    assert verify(tmp_path).state is BundleState.INCOMPLETE
    (tmp_path / "notes.txt").write_text("x")
    assert verify(tmp_path).state is BundleState.BROKEN


def test_a_thousand_files_verify_in_under_two_seconds(tmp_path: Path) -> None:
    checks = tuple(
        Check(id=f"kernels/op/cell{i}", stage="kernels", proves="x", cost_s=0.0) for i in range(499)
    )  # fmt: skip
    plan = example_plan(scene="passing", checks=checks)
    table = SampleTable(name="errors", columns=("us",), rows=((1.0,), (2.0,)))
    with open_run(tmp_path / "run", plan) as run:
        for check in checks:
            samples = Samples(check=check.id, tier=plan.tier, tables=(table,))
            run.record(_plain_judge(check, samples), samples)
        write_bundle(run, Environment())
    begun = time.process_time()  # others may share the cores
    result = verify(tmp_path / "run", _plain_judge)
    taken_s = time.process_time() - begun
    assert result.state is BundleState.VERIFIED
    assert result.steps[0].looked_at > 1000
    assert taken_s < 2.0


def test_memory_does_not_grow_with_the_bundle(bundle: Path) -> None:
    with (bundle / "logs" / "huge.log").open("wb") as file:
        file.truncate(256 * 2**20)
    _relist(bundle, "logs/huge.log")
    tracemalloc.start()
    result = verify(bundle)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.state is BundleState.VERIFIED
    assert peak < 32 * 2**20


def test_verifying_loads_no_torch() -> None:
    code = "import sys, harness.evidence.verify, harness.gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _relist(bundle: Path, name: str) -> None:
    from harness.domain.bundle import FileEntry
    from harness.evidence.bundle import digest_file

    manifest = parse_record((bundle / "manifest.json").read_bytes(), Manifest)
    sha256, size = digest_file(bundle / name)
    files = sorted((*manifest.files, FileEntry(path=name, sha256=sha256, size=size)), key=lambda f: f.path)
    (bundle / "manifest.json").write_bytes(manifest.model_copy(update={"files": tuple(files)}).canonical())


def _plain_judge(check: Check, samples: Samples) -> Outcome:
    return Outcome(
        check=check.id, status=Status.INCONCLUSIVE, tier=samples.tier, summary="seen", next_step="run more"
    )  # fmt: skip
