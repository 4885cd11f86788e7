"""What a check run says, and that only an admission lets a pull request pass."""

import pytest

from harness.domain.check import Severity
from harness.domain.verdict import Answer
from harness.forge.check_run import CONCLUSIONS, Annotations, annotations_of, check_run_requests
from harness.forge.pull_request import PullRequest
from harness.forge.requests import CheckRun
from tests.forge.material import BASE, BODY, HEAD, change_of, finding, outcome_with, verdict_of

PULL = PullRequest(owner="o", repo="r", number=1, base=BASE, head=HEAD)


def test_only_an_admission_gives_a_conclusion_that_passes() -> None:
    assert CONCLUSIONS == {
        Answer.ADMITTED: "success",
        Answer.REJECTED: "failure",
        Answer.COULD_NOT_JUDGE: "action_required",
    }


def test_a_run_names_the_head_the_bundle_and_the_policy() -> None:
    (request,) = check_run_requests(
        PULL, verdict_of(Answer.COULD_NOT_JUDGE), BODY, "9" * 64, Annotations((), 0)
    )
    assert request.path == "/repos/o/r/check-runs"
    assert isinstance(request.body, CheckRun)
    assert request.body.external_id == f"bundle {'9' * 64}"
    assert request.body.output.title == "could not judge under policy fast_track"
    assert request.body.output.summary == BODY


def test_findings_become_annotations_worst_first_and_each_once() -> None:
    note = finding(line=1, severity=Severity.NOTE, rule="hint", message="long line")
    warning = finding(
        line=2, severity=Severity.WARNING, rule="env", message="reads HOME", remedy="pass it in"
    )
    error = finding(line=9)
    found = annotations_of(change_of("a.py"), [outcome_with(note, warning), outcome_with(error, warning)])
    assert [(a.annotation_level, a.start_line, a.title, a.message) for a in found.shown] == [
        ("failure", 9, "monkey_patch", "patches torch"),
        ("warning", 2, "env", "reads HOME\nTo do: pass it in"),
        ("notice", 1, "hint", "long line"),
    ]
    assert found.left_out == 0


def test_a_waived_error_is_a_notice_that_names_the_waiver() -> None:
    found = annotations_of(
        change_of("a.py"), [outcome_with(finding(waived="gatekeeper: seen (until 2027-06-30)"))]
    )
    assert found.shown[0].annotation_level == "notice"
    assert found.shown[0].message == "patches torch\nWaived: gatekeeper: seen (until 2027-06-30)"


def test_a_finding_without_a_line_stands_at_the_first() -> None:
    found = annotations_of(change_of("a.py"), [outcome_with(finding(line=None))])
    assert (found.shown[0].start_line, found.shown[0].end_line) == (1, 1)


@pytest.mark.parametrize("path", ["b.py", None, "../a.py", "/etc/passwd"])
def test_a_finding_outside_the_change_is_counted_and_not_placed(path: str | None) -> None:
    assert annotations_of(change_of("a.py"), [outcome_with(finding(path))]) == ((), 1)


def test_a_path_that_acts_on_a_terminal_and_a_deleted_file_get_no_annotation() -> None:
    odd = "a\x1b[2J.py"
    assert annotations_of(change_of(odd), [outcome_with(finding(odd))]) == ((), 1)
    gone = change_of("a.py").model_copy(
        update={"files": (change_of("a.py").files[0].model_copy(update={"status": "deleted"}),)}
    )
    assert annotations_of(gone, [outcome_with(finding())]) == ((), 1)


def test_huge_and_hostile_texts_are_cut_and_cannot_act() -> None:
    hostile = finding(rule="r" * 900, message="\x1b[31m\u202e@everyone\n" * 9000, remedy="x" * 90_000)
    (shown,) = annotations_of(change_of("a.py"), [outcome_with(hostile)]).shown
    assert len(shown.title) <= 255
    assert len(shown.message) < 16_000
    assert "\x1b" not in shown.message
    assert "\u202e" not in shown.message


def test_what_is_left_out_is_said_in_the_summary() -> None:
    findings = tuple(finding(line=n) for n in range(1, 260))
    found = annotations_of(change_of("a.py"), [outcome_with(*findings)])
    requests = check_run_requests(PULL, verdict_of(), BODY, "9" * 64, found)
    assert [len(r.body.output.annotations) for r in requests if hasattr(r.body, "output")] == [50] * 4
    assert requests[0].body.output.summary.endswith(  # type: ignore[union-attr]  # a check run's body
        "\n\nFindings that are not shown at lines: 59; the report has all.\n"
    )


def test_a_summary_of_the_greatest_length_is_still_accepted() -> None:
    body = BODY + "x" * (65_535 - len(BODY))
    (request,) = check_run_requests(PULL, verdict_of(), body, "9" * 64, Annotations((), 3))
    assert len(request.body.output.summary) == 65_535  # type: ignore[union-attr]  # as above
