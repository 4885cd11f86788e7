"""The stage from a commit to its outcomes."""

import os
from datetime import date
from typing import Any

import pytest

from harness import forking
from harness.domain.check import Outcome, Samples, Status
from harness.domain.errors import InputError
from harness.domain.policy import Waiver
from harness.domain.stage import PlanRequest
from harness.stages.isolation import judge, plan, sample
from harness.stages.isolation.sampling import sample_on
from harness.stages.isolation.tables import SHAPES
from tests.stages.spoiled_tables import spoiled

PATCH = "from engine.core import Scheduler\n\nScheduler.limit = 8\n"
TODAY = date(2026, 11, 29)


def errors(outcome: Outcome) -> list[tuple[str, str | None, int | None]]:
    return [
        (f.rule, f.path, f.line) for f in outcome.findings if f.severity.value == "error" and not f.waived
    ]


def request_for(bench: Any) -> PlanRequest:
    bench.judge()
    return PlanRequest(
        pack=bench.context.pack, claim=bench.claim, policy=bench.policy, zones=bench.context.zones,
        rules=bench.rules, change=bench.context.change, machine=bench.context.machine,
        tier=bench.context.tier, is_full=False, seed=0,
    )  # fmt: skip


def test_a_clean_change_of_model_code_passes_every_family_with_its_control(bench: Any) -> None:
    bench.commit(
        {"models/k3/step.py": "rows = 2\n", "tests/k3/test_new.py": "def test_rows():\n    assert 2\n"}
    )
    outcomes = bench.judge()
    assert list(outcomes) == ["zones", "reach", "opt_in", "blast_radius", "features", "hygiene"]
    assert {o.status for o in outcomes.values()} == {Status.PASS}
    assert all(o.control is not None and o.control.failed for o in outcomes.values())
    assert outcomes["zones"].summary == "touches 1 file of model_code, 1 file of tests"
    figures = {f.name: f.value for f in outcomes["zones"].figures}
    assert figures["files_model_code"] == 1
    assert figures["added_lines_tests"] == 2


def test_a_reach_into_shared_code_fails_with_file_and_line(bench: Any) -> None:
    bench.commit({"models/k3/step.py": PATCH})
    outcome = bench.judge()["reach"]
    assert outcome.status is Status.FAIL
    assert errors(outcome) == [("monkey_patch", "models/k3/step.py", 3)]
    assert outcome.summary == "1 error in 1 file; first monkey_patch at models/k3/step.py:3"
    assert outcome.next_step.startswith("Write a subclass")


def test_only_added_lines_count(bench: Any) -> None:
    bench.commit({"models/k3/step.py": PATCH})
    bench.commit({"models/k3/step.py": PATCH + "rows = 2\n"})
    assert bench.judge()["reach"].status is Status.PASS


def test_every_line_of_a_file_that_was_moved_from_another_zone_counts(bench: Any) -> None:
    bench.commit({"tests/k3/patches.py": PATCH + "rows = 1\n" * 9})
    bench.commit({"tests/k3/patches.py": None, "models/k3/patches.py": PATCH + "rows = 1\n" * 9})
    assert errors(bench.judge()["reach"]) == [("monkey_patch", "models/k3/patches.py", 3)]


def test_every_line_of_a_copy_counts(bench: Any) -> None:
    bench.commit({"tests/k3/patches.py": PATCH + "rows = 1\n" * 9})
    bench.commit(
        {"tests/k3/patches.py": PATCH + "rows = 1\n" * 10, "models/k3/p.py": PATCH + "rows = 1\n" * 9}
    )
    assert errors(bench.judge()["reach"]) == [("monkey_patch", "models/k3/p.py", 3)]


def test_the_claims_part_may_not_leave_its_zones(bench: Any) -> None:
    bench.policy = bench.policy.model_copy(update={"outside_pack_families": bench.policy.rule_families})
    bench.commit({"models/k3/step.py": "rows = 2\n", "engine/core.py": "class Scheduler:\n    limit = 5\n"})
    outcome = bench.judge()["zones"]
    assert outcome.status is Status.FAIL
    assert errors(outcome) == [("zone_breach", "engine/core.py", None)]


def test_moving_a_file_out_of_shared_code_is_a_breach_too(bench: Any) -> None:
    bench.policy = bench.policy.model_copy(update={"outside_pack_families": bench.policy.rule_families})
    bench.git("mv", "engine/core.py", "models/k3/core.py")
    bench.commit({})
    assert errors(bench.judge()["zones"]) == [("zone_breach", "engine/core.py", None)]


def test_a_file_outside_the_claim_is_judged_by_the_outside_families_alone(bench: Any) -> None:
    bench.commit({"engine/core.py": "class Scheduler:\n    def schedule(self, now): ...\n"})
    outcomes = bench.judge()
    assert list(outcomes) == ["zones", "reach", "hygiene"]
    assert outcomes["zones"].status is Status.PASS


def test_a_path_without_a_zone_fails_wherever_it_lies(bench: Any) -> None:
    bench.commit({"tools/build.sh": "echo\n"})
    outcome = bench.judge()["zones"]
    assert outcome.status is Status.FAIL
    assert errors(outcome) == [("unknown_zone", "tools/build.sh", None)]


def test_an_empty_change_is_no_evidence(bench: Any) -> None:
    outcomes = bench.judge(base="HEAD")
    assert {name: o.status for name, o in outcomes.items()} == {"zones": Status.NO_EVIDENCE}
    assert outcomes["zones"].summary == "the change is empty"


def test_a_rule_that_misses_its_planted_violation_makes_silence_no_evidence(bench: Any) -> None:
    blunt = [
        r.model_copy(update={"patterns": ("never($$$A)",)}) if r.id == "dynamic_code" else r
        for r in bench.rules
    ]
    bench.rules = tuple(blunt)
    bench.commit({"models/k3/step.py": "rows = 2\n"})
    outcome = bench.judge()["reach"]
    assert outcome.status is Status.NO_EVIDENCE
    assert "dynamic_code" in outcome.summary
    assert outcome.control is not None
    assert not outcome.control.failed


def test_a_family_without_rules_is_no_evidence(bench: Any) -> None:
    bench.rules = tuple(r for r in bench.rules if r.family != "reach")
    bench.commit({"models/k3/step.py": "rows = 2\n"})
    assert bench.judge()["reach"].status is Status.NO_EVIDENCE


def test_a_zone_map_that_forbids_nothing_is_still_tried_on_an_unknown_path(bench: Any) -> None:
    bench.policy = bench.policy.model_copy(
        update={"allowed_zones": ("model_code", "tests", "docs", "shared_core", "policy")}
    )
    bench.commit({"models/k3/step.py": "rows = 2\n"})
    outcome = bench.judge()["zones"]
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.observed.startswith("1 of 1 violations caught")


def test_a_waiver_holds_until_its_last_day(bench: Any) -> None:
    waiver = Waiver(
        rule="monkey_patch",
        path="/models/k3/step.py",
        owner="g",
        reason="agreed with the owners",
        expires=TODAY,
    )
    bench.policy = bench.policy.model_copy(update={"waivers": (waiver,)})
    bench.commit({"models/k3/step.py": PATCH})
    held, over = bench.judge(today=TODAY)["reach"], bench.judge(today=date(2026, 11, 30))["reach"]
    assert (held.status, over.status) == (Status.PASS, Status.FAIL)
    assert [f.waived for f in held.findings] == ["g, until 2026-11-29: agreed with the owners"]
    assert {f.name: f.value for f in held.figures}["waived_errors"] == 1


def test_a_waiver_for_another_path_or_rule_covers_nothing(bench: Any) -> None:
    waivers = tuple(
        Waiver(rule=rule, path=path, owner="g", reason="agreed with the owners", expires=TODAY)
        for rule, path in (("monkey_patch", "/models/k3/other.py"), ("dynamic_code", "/models/k3/**"))
    )
    bench.policy = bench.policy.model_copy(update={"waivers": waivers})
    bench.commit({"models/k3/step.py": PATCH})
    assert bench.judge()["reach"].status is Status.FAIL


def test_a_rule_about_a_feature_counts_where_the_claim_keeps_it(bench: Any) -> None:
    refusal = "def check(params):\n    if params.temperature > 0:\n        raise ValueError\n"
    bench.commit({"models/k3/step.py": refusal})
    assert errors(bench.judge()["features"]) == [("keeps_temperature_sampling", "models/k3/step.py", 2)]
    bench.claim = bench.claim.model_copy(update={"features": ("full_context",)})
    assert bench.judge()["features"].status is Status.PASS


def test_the_size_limit_counts_added_lines_without_tests_and_docs(bench: Any) -> None:
    proofs = tuple(
        p.model_copy(update={"thresholds": (("max_added_lines", 60),)}) for p in bench.policy.proofs
    )
    bench.policy = bench.policy.model_copy(update={"proofs": proofs})
    bench.commit({"models/k3/a.py": "x = 1\n" * 60, "tests/k3/test_b.py": "x = 1\n" * 500})
    outcome = bench.judge()["blast_radius"]
    assert outcome.status is Status.PASS
    assert outcome.summary == "60 lines added outside tests and docs (50 to 250)"
    bench.commit({"models/k3/a.py": "y = 1\n" * 61})
    assert bench.judge()["blast_radius"].status is Status.FAIL


@pytest.mark.parametrize(
    ("lines", "band"), [(49, "under 50"), (50, "50 to 250"), (250, "50 to 250"), (251, "above 250")]
)
def test_size_bands_are_those_of_vllm(bench: Any, lines: int, band: str) -> None:
    bench.commit({"models/k3/a.py": "x = 1\n" * lines})
    assert f"({band})" in bench.judge()["blast_radius"].summary


def test_binary_links_and_other_encodings_are_findings_and_no_errors_of_ours(bench: Any) -> None:
    os.symlink("/etc/passwd", bench.root / "models/k3/weights")
    bench.commit({"models/k3/k.cubin": b"\x7fELF\0", "models/k3/latin.py": "é = 1\n".encode("latin-1")})
    assert errors(bench.judge()["hygiene"]) == [
        ("opaque_code", "models/k3/k.cubin", None),
        ("opaque_code", "models/k3/latin.py", None),
        ("link_out_of_tree", "models/k3/weights", None),
    ]


def test_code_that_no_tree_can_be_made_of_in_bounded_time_is_a_finding(bench: Any) -> None:
    bench.commit(
        {
            "models/k3/deep.py": "x = (a\n" + ".b\n" * 30_000 + ")\n",
            "models/k3/long.py": "x = '" + "a" * 30_000 + "'\n",
        }
    )
    found = errors(bench.judge()["hygiene"])
    assert ("unreadable_code", "models/k3/deep.py", 1) in found
    assert ("unreadable_code", "models/k3/long.py", 1) in found


def test_findings_come_in_order_of_path_line_and_rule(bench: Any) -> None:
    bench.commit(
        {"models/k3/b.py": "exec(x)\n", "models/k3/a.py": "x = 1\neval(x)\nimport socket\nexec(x)\n"}
    )
    assert errors(bench.judge()["reach"]) == [
        ("dynamic_code", "models/k3/a.py", 2),
        ("outside_world", "models/k3/a.py", 3),
        ("dynamic_code", "models/k3/a.py", 4),
        ("dynamic_code", "models/k3/b.py", 1),
    ]


def test_the_places_that_read_the_switch_are_drawn(bench: Any) -> None:
    bench.commit(
        {"models/k3/select.py": "def pick(extra):\n    return extra.get('decode_backend', 'auto')\n"}
    )
    figure = next(f for f in bench.judge()["opt_in"].figures if f.name == "selection_places")
    assert figure.value == 1
    assert figure.note == "selection models/k3/select.py:2; default models/k3/select.py:2"


def test_a_second_place_that_reads_the_switch_is_counted_though_it_was_there_before(bench: Any) -> None:
    read = "def pick(extra):\n    return extra.get('decode_backend', 'auto')\n"
    bench.commit({"models/k3/one.py": read})
    bench.commit({"models/k3/two.py": read})
    figure = next(f for f in bench.judge()["opt_in"].figures if f.name == "selection_places")
    assert figure.value == 2


def test_judging_needs_nothing_but_the_samples(bench: Any) -> None:
    bench.commit({"models/k3/step.py": PATCH})
    checks = plan(request_for(bench))
    outcomes = bench.judge()
    change_head = bench.context.change.head
    assert change_head
    for check in checks:
        again = Samples.from_json(_samples(bench, check).canonical())
        redone = judge(check, again)
        assert redone.status is outcomes[str(check.subject)].status
        assert redone.findings == outcomes[str(check.subject)].findings


def _samples(bench: Any, check: Any) -> Samples:
    from dataclasses import replace

    from harness.repository import load_change

    change, tree = load_change(bench.root, "HEAD~1", "HEAD")
    with tree:
        return sample_on(check, replace(bench.context, tree=tree, change=change), TODAY)


def test_a_change_without_its_lines_is_refused_rather_than_passed(bench: Any) -> None:
    from dataclasses import replace

    bench.commit({"models/k3/step.py": PATCH})
    checks = plan(request_for(bench))
    context = replace(bench.context, change=bench.context.change.without_hunks())
    from harness.repository import load_change

    _, tree = load_change(bench.root, "HEAD~1", "HEAD")
    with tree, pytest.raises(InputError, match="was given without its lines"):
        sample(checks[1], replace(context, tree=tree))


def test_a_worker_without_the_repository_is_told_so(bench: Any) -> None:
    from dataclasses import replace

    bench.commit({"models/k3/step.py": PATCH})
    checks = plan(request_for(bench))
    with pytest.raises(InputError, match="reads the repository, and none was given"):
        sample(checks[0], replace(bench.context, tree=None))


def test_samples_that_do_not_fit_are_invalid_and_never_a_crash(bench: Any) -> None:
    bench.commit({"models/k3/step.py": "rows = 2\n"})
    for check in plan(request_for(bench)):
        for done, bad in spoiled(_samples(bench, check), SHAPES):
            assert judge(check, bad).status is Status.INVALID, done


def test_two_processes_find_what_one_finds(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The override is known only from a file of the tree that the change leaves alone."""
    override = "from engine.core import Scheduler\n\n\nclass Own(Scheduler):\n    def _admit(self): ...\n"
    bench.commit({"engine/core.py": "class Scheduler:\n    def _admit(self): ...\n"})
    bench.commit({f"models/k3/own_{n}.py": override for n in range(6)} | {"models/k3/step.py": PATCH})
    monkeypatch.setattr(forking, "processes_for", lambda places, at_least: 1)
    alone = bench.judge()
    monkeypatch.setattr(forking, "processes_for", lambda places, at_least: 2)
    shared = bench.judge()
    found = [(f.rule, f.path, f.line) for f in alone["reach"].findings]
    assert ("private_override", "models/k3/own_5.py", 5) in found
    assert [o.findings for o in shared.values()] == [o.findings for o in alone.values()]


@pytest.mark.parametrize(
    "line",
    [
        "def broken(:",
        "x = a" + ".b" * 3000,
        "x = f" + "()" * 300,
        "\n".join(f"x{n + 1} = x{n}" for n in range(200)) + "\nx200.y = 1",
    ],
    ids=["no_code", "long_chain", "many_calls", "many_names"],
)
def test_a_line_that_nothing_can_follow_hides_no_reach(bench: Any, line: str) -> None:
    bench.commit({"models/k3/step.py": f"{PATCH}{line}\n"})
    found = {f.rule for outcome in bench.judge().values() for f in outcome.findings}
    assert "unreadable_code" in found
