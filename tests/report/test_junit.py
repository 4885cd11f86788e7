"""Outcomes for CI systems that show tests."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from harness.domain.check import Figure, Outcome, Status
from harness.domain.verdict import Verdict
from harness.evidence.reader import Bundle, open_bundle
from harness.gate import Submission, decide, load_submission
from harness.report.junit import render_junit, sampling_times
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_policy, write_example
from tests.report.hostile import write_hostile

Rendered = tuple[Bundle, Submission, Verdict]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    folder = write_example(tmp_path_factory.mktemp("junit") / "mixed")
    submission = load_submission(folder, judge, as_planned)
    return open_bundle(folder), submission, decide([submission], example_policy())


def _root(mixed: Rendered, **changes: Status) -> ET.Element:
    """The file, with other statuses where `changes` says so by the end of a check's id."""
    bundle, submission, verdict = mixed
    outcomes = [_with_status(o, changes) for o in submission.outcomes]
    return ET.fromstring(render_junit(bundle, outcomes, verdict, sampling_times(bundle)))


def _with_status(outcome: Outcome, changes: dict[str, Status]) -> Outcome:
    found = next((s for name, s in changes.items() if outcome.check.split("/")[1] == name), None)
    return outcome if found is None else outcome.model_copy(update={"status": found, "next_step": "x"})


def _case(root: ET.Element, name: str) -> ET.Element:
    return next(case for case in root.iter("testcase") if case.get("name") == name)


def test_a_suite_for_each_stage_and_one_for_the_gate_with_their_counts(mixed: Rendered) -> None:
    root = _root(mixed)
    assert [(s.get("name"), s.get("tests"), s.get("failures"), s.get("skipped")) for s in root] == [
        ("isolation", "4", "1", "0"), ("audit", "6", "1", "0"), ("kernels", "15", "2", "0"),
        ("coverage", "10", "1", "0"), ("evals", "3", "1", "1"), ("sweep", "6", "1", "0"),
        ("gate", "7", "6", "0"),
    ]  # fmt: skip
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("51", "13", "0")


def test_a_check_that_did_not_pass_fails_with_its_status_summary_and_next_step(mixed: Rendered) -> None:
    case = _case(_root(mixed), "coverage/poison/attn_res")
    (failure,) = case.findall("failure")
    assert (case.get("classname"), case.get("time")) == ("coverage.attn_res", "0.250")
    assert failure.get("type") == "NO_EVIDENCE"
    assert "To do: read the samples of this check" in str(failure.get("message"))


def test_a_passed_check_has_its_control_and_figures(mixed: Rendered) -> None:
    case = _case(_root(mixed), "audit/kda_step/sm_90a")
    assert case.find("failure") is None
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["status"] == "PASS"
    assert properties["control"] == "1 finding in the planted kernel"
    assert properties["spill_bytes"] == "0 B"


def test_invalid_is_an_error_and_what_is_not_required_fails_nothing(mixed: Rendered) -> None:
    root = _root(mixed, drift=Status.INVALID, aime25=Status.FAIL)
    (error,) = _case(root, "evals/drift/canary").findall("error")
    assert error.get("type") == "INVALID"
    (skipped,) = _case(root, "evals/aime25/canary").findall("skipped")
    assert str(skipped.get("message")).startswith("not required: FAIL: ")


def test_each_proof_that_the_policy_demands_is_a_case_of_the_gate(mixed: Rendered) -> None:
    gate = next(suite for suite in _root(mixed) if suite.get("name") == "gate")
    assert [case.get("name") for case in gate.iter("testcase") if case.find("failure") is None] == [
        "audit on sm_90a"
    ]
    failed = _case(gate, "audit on sm_100a").find("failure")
    assert failed is not None
    assert failed.get("message") == "1 of 3 required checks did not pass (1 FAIL)"


def test_a_bundle_that_could_not_be_judged_is_one_error_and_shows_no_outcome(mixed: Rendered) -> None:
    verdict = decide([], example_policy())
    root = ET.fromstring(render_junit(mixed[0], (), verdict, {}))
    (suite,) = root
    (error,) = suite.iter("error")
    assert (error.get("type"), error.get("message")) == ("could_not_judge", "no bundle was given")
    assert root.get("errors") == "1"


def test_text_of_a_hostile_bundle_is_well_formed_and_can_only_be_read(tmp_path: Path) -> None:
    bundle = open_bundle(write_hostile(tmp_path / "hostile"))
    verdict = decide([], example_policy())
    worst = [
        o.model_copy(
            update={
                "summary": o.summary + "\ufffe\uffff\x00]]>",
                "figures": (Figure(name="\uffff", value=1),),
            }
        )
        for o in bundle.outcomes
    ]
    text = render_junit(bundle, worst, verdict, {})
    root = ET.fromstring(text)
    assert "<script>" not in text
    said = "".join(str(e.get("message")) + (e.text or "") for e in root.iter())
    assert not {"\u202e", "\x1b", "\ufffe", "\uffff"} & set(text)
    assert "\\ufffe\\uffff\\u0000]]>" in said
