"""Findings for tools that show them beside the lines they are about."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Finding, Outcome, Severity
from harness.evidence.reader import Bundle, open_bundle
from harness.gate import decide, load_submission
from harness.report.sarif import render_sarif
from tests.evidence.example_judge import judge
from tests.evidence.example_run import HEAD, as_planned, example_policy, write_example
from tests.report.hostile import ACTIVE, write_hostile


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, dict[str, Any]]:
    folder = write_example(tmp_path_factory.mktemp("sarif") / "mixed")
    return open_bundle(folder), _log(folder)


def _log(folder: Path) -> dict[str, Any]:
    bundle = open_bundle(folder)
    submission = load_submission(folder, judge, as_planned)
    verdict = decide([submission], example_policy())
    log: dict[str, Any] = json.loads(render_sarif(bundle, bundle.outcomes, verdict))
    return log


def _results(bundle: Bundle, finding: Finding) -> Any:
    """The one result of a bundle whose first outcome has this finding alone."""
    outcomes: list[Outcome] = [bundle.outcomes[0].model_copy(update={"findings": (finding,)})]
    log = json.loads(render_sarif(bundle, outcomes, decide([], example_policy())))
    (result,) = log["runs"][0]["results"]
    return result


def test_a_finding_is_a_result_at_its_line_with_its_rule_and_remedy(
    mixed: tuple[Bundle, dict[str, Any]],
) -> None:
    _, log = mixed
    (run,) = log["runs"]
    breach = next(r for r in run["results"] if r["ruleId"] == "zones")
    assert breach["level"] == "error"
    assert breach["message"]["text"] == (
        "the pack's part of the change touches shared_core To do: move the decision into the model's own "
        "dispatcher"
    )
    (location,) = breach["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {
        "uri": "vllm/v1/core/sched.py",
        "uriBaseId": "SRCROOT",
    }
    assert location["physicalLocation"]["region"]["startLine"] == 118
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "isolation/zones/change"
    assert run["tool"]["driver"]["rules"][breach["ruleIndex"]]["id"] == "zones"


def test_a_waived_finding_is_a_suppressed_result(mixed: tuple[Bundle, dict[str, Any]]) -> None:
    _, log = mixed
    waived = next(r for r in log["runs"][0]["results"] if r["ruleId"] == "new_dependency")
    assert waived["suppressions"] == [
        {
            "kind": "external",
            "status": "accepted",
            "justification": "gatekeeper: peers are never imported by the model (until 2027-06-30)",
        }
    ]


def test_the_run_names_head_verdict_and_every_check_that_did_not_pass(
    mixed: tuple[Bundle, dict[str, Any]],
) -> None:
    bundle, log = mixed
    (run,) = log["runs"]
    assert run["versionControlProvenance"] == [
        {
            "repositoryUri": "https://github.com/example/vllm",
            "revisionId": HEAD,
            "mappedTo": {"uriBaseId": "SRCROOT"},
        }
    ]
    assert run["properties"]["answer"] == "rejected"
    assert run["properties"]["bundleDigest"] == bundle.digest
    (invocation,) = run["invocations"]
    assert invocation["exitCode"] == 1
    said = [(n["level"], n["descriptor"]["id"]) for n in invocation["toolExecutionNotifications"]]
    assert said[:7] == [
        ("error", "FAIL"), ("error", "FAIL"), ("error", "FAIL"), ("error", "FAIL"), ("error", "NO_EVIDENCE"),
        ("error", "INCONCLUSIVE"), ("note", "SKIPPED"),
    ]  # fmt: skip
    assert said[-1] == ("error", "gate/rejected")


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("kernels/a b.py", "kernels/a%20b.py"),
        ("kernels/ü#1?.py", "kernels/%C3%BC%231%3F.py"),
        ("/etc/passwd", None),
        ("../../etc/passwd", None),
        ("a\\..\\b", None),
        (None, None),
    ],
)
def test_a_path_that_leaves_the_repository_gets_no_location_to_open(
    mixed: tuple[Bundle, dict[str, Any]], path: str | None, uri: str | None
) -> None:
    finding = Finding(rule="r", severity=Severity.NOTE, message="m", path=path, line=0)
    (location,) = _results(mixed[0], finding)["locations"]
    physical = location.get("physicalLocation", {}).get("artifactLocation", {})
    assert physical.get("uri") == uri
    assert "region" not in location.get("physicalLocation", {})


def test_a_finding_that_moved_to_another_line_keeps_its_fingerprint(
    mixed: tuple[Bundle, dict[str, Any]],
) -> None:
    one, moved, other = (
        Finding(rule="r", severity=Severity.ERROR, message="m", path=path, line=line, excerpt="x = 1")
        for path, line in (("a.py", 3), ("a.py", 9), ("b.py", 3))
    )
    prints = [_results(mixed[0], f)["partialFingerprints"]["finding/v1"] for f in (one, moved, other)]
    assert prints[0] == prints[1] != prints[2]


def test_text_of_a_hostile_bundle_can_only_be_read(tmp_path: Path) -> None:
    folder = write_hostile(tmp_path / "hostile")
    bundle = open_bundle(folder)
    text = render_sarif(bundle, bundle.outcomes, decide([], example_policy()))
    assert json.loads(text)["version"] == "2.1.0"
    for char in "\u202e\x1b\u2066":
        assert char not in json.dumps(json.loads(text), ensure_ascii=False)
    assert ACTIVE[0] in json.dumps(json.loads(text), ensure_ascii=False)
