"""Publishing to a pull request: what is sent, what is refused, and what an attacker cannot do.

The server on the other side is made from GitHub's published description; `violations` holds whatever either
side did against it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.domain.bundle import BundleState
from harness.domain.errors import EvidenceError, FasttrackError, InputError, ServiceError
from harness.forge.client import open_client
from harness.forge.publish import Publication, Result, Wanted, publish
from harness.forge.pull_request import PullRequestName
from harness.report.markdown import MARKER
from tests.forge.github_server import FakeGitHub, Fault, serve_github
from tests.forge.material import (
    BASE,
    BODY,
    HEAD,
    TOKEN,
    access_to,
    change_of,
    example_result,
    finding,
    github,
    manifest_about,
    outcome_with,
)

NAME = PullRequestName("o", "r", 61867)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return example_result(tmp_path_factory.mktemp("forge") / "bundle")


@pytest.fixture
def server() -> Iterator[FakeGitHub]:
    with serve_github(github()) as served:
        yield served
        assert served.violations == []


def _publish(server: FakeGitHub, result: Result, token: str | None = TOKEN, **wanted: Any) -> Publication:
    with open_client(access_to(server, token), say=lambda words: None) as client:
        return publish(client, NAME, result, Wanted(**wanted))


def test_a_first_publication_writes_one_comment_and_one_check_run(server: FakeGitHub, result: Result) -> None:
    done = _publish(server, result)
    assert [c["body"] for c in server.comments] == [BODY]
    run = server.check_runs[7]
    assert (run["name"], run["head_sha"], run["conclusion"]) == ("fasttrack", HEAD, "failure")
    assert done.addresses == ("https://github.example/o/r/pull/1#100", "https://github.example/o/r/runs/7")


def test_a_second_publication_edits_the_comment_and_leaves_others_alone(
    server: FakeGitHub, result: Result
) -> None:
    server.add_comment("somebody", "looks good")
    _publish(server, result, check_run=False)
    _publish(server, replace(result, body=BODY + "again\n"), check_run=False)
    assert [c["body"] for c in server.comments] == ["looks good", BODY + "again\n"]


def test_the_same_comment_again_is_not_sent(server: FakeGitHub, result: Result) -> None:
    _publish(server, result, check_run=False)
    server.comments[0]["body"] = BODY.replace("\n", "\r\n")  # as GitHub may store it
    again = _publish(server, result, check_run=False)
    assert (again.requests, again.notes) == ((), ("our comment says this already",))


def test_a_comment_with_our_marker_by_somebody_else_is_not_taken_for_ours(
    server: FakeGitHub, result: Result
) -> None:
    forged = server.add_comment("attacker", f"{MARKER}\n\n## fasttrack: admitted")
    _publish(server, result, check_run=False)
    assert server.comments[0]["id"] == forged
    assert server.comments[0]["body"].endswith("admitted")
    assert server.comments[1]["body"] == BODY


def test_a_marker_quoted_inside_our_own_account_s_comment_is_not_the_comment(
    server: FakeGitHub, result: Result
) -> None:
    server.add_comment("octocat", f"the marker is {MARKER}")
    _publish(server, result, check_run=False)
    assert len(server.comments) == 2


def test_our_comment_is_found_on_a_later_page(server: FakeGitHub, result: Result) -> None:
    for number in range(150):
        server.add_comment("somebody", f"remark {number}")
    server.add_comment("octocat", f"{MARKER}\nold")
    _publish(server, result, check_run=False)
    assert len(server.comments) == 151
    assert server.comments[150]["body"] == BODY


def test_a_second_comment_of_ours_is_marked_as_superseded(server: FakeGitHub, result: Result) -> None:
    server.add_comment("octocat", f"{MARKER}\nfirst")
    server.add_comment("octocat", f"{MARKER}\nof a run at the same time")
    _publish(server, result, check_run=False)
    assert [c["body"] for c in server.comments] == [
        BODY,
        "This result of fasttrack was superseded by another comment on this pull request.",
    ]


def test_more_comments_than_can_be_searched_are_refused(
    server: FakeGitHub, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.forge.publish.MAX_PAGES", 1)
    for number in range(100):
        server.add_comment("somebody", f"remark {number}")
    with pytest.raises(InputError, match="has over 100 comments"):
        _publish(server, result)
    assert server.writes == []


def test_an_apps_token_needs_to_be_told_whose_comments_are_its_own(
    server: FakeGitHub, result: Result
) -> None:
    server.login = None
    with pytest.raises(InputError, match="--as 'github-actions\\[bot\\]'"):
        _publish(server, result)
    _publish(server, result, login="github-actions[bot]")
    _publish(server, result, login="github-actions[bot]")
    assert [c["body"] for c in server.comments] == [BODY]


def test_more_than_fifty_annotations_go_into_updates_and_the_verdict_into_the_last(
    server: FakeGitHub, result: Result
) -> None:
    findings = tuple(finding("a.py", line) for line in range(1, 121))
    _publish(
        server, replace(result, change=change_of("a.py"), outcomes=(outcome_with(*findings),)), comment=False
    )
    assert [s.method for s in server.writes] == ["POST", "PATCH", "PATCH"]
    assert [s.body["status"] for s in server.writes] == ["in_progress", "in_progress", "completed"]
    assert [s.body.get("conclusion") for s in server.writes] == [None, None, "failure"]
    assert [a["start_line"] for a in server.check_runs[7]["annotations"]] == list(range(1, 121))


def test_a_dry_run_sends_nothing_and_shows_what_a_real_run_then_sends(
    server: FakeGitHub, result: Result
) -> None:
    shown = _publish(server, result, is_dry_run=True)
    assert server.writes == []
    _publish(server, result)
    assert [(s.method, s.path, s.body) for s in server.writes] == [
        (r.method, r.path, r.json_body()) for r in shown.requests
    ]


def test_a_dry_run_needs_no_token_and_says_what_it_then_cannot_know(
    server: FakeGitHub, result: Result
) -> None:
    shown = _publish(server, result, token=None, is_dry_run=True)
    assert [r.method for r in shown.requests] == ["POST", "POST"]
    assert shown.notes == ("without a token, an earlier comment of ours is not looked for",)
    assert {s.authorization for s in server.seen} == {None}


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ({"head": "d" * 40}, "its head is aaaaaaaaaaaa, the pull request's is dddddddddddd"),
        ({"merge_base": "e" * 40}, "its base is bbbbbbbbbbbb, the pull request starts from eeeeeeeeeeee"),
    ],
)
def test_a_pull_request_of_another_head_or_base_is_refused(
    moved: dict[str, str], words: str, result: Result
) -> None:
    with serve_github(github(**moved)) as server:
        with pytest.raises(EvidenceError, match=words):
            _publish(server, result)
        assert server.writes == []
        assert server.violations == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"pr": 5}, "it was made for pull request 5"), ({"is_dirty": True}, "made with uncommitted code")],
)
def test_a_bundle_of_another_pull_request_or_of_uncommitted_code_is_refused(
    changed: dict[str, Any], words: str, server: FakeGitHub, result: Result
) -> None:
    with pytest.raises(EvidenceError, match=words):
        _publish(server, replace(result, manifest=manifest_about(result, **changed)))
    assert server.writes == []


def test_a_bundle_that_was_made_without_a_number_is_published_by_its_commits(
    server: FakeGitHub, result: Result
) -> None:
    _publish(server, replace(result, manifest=manifest_about(result, pr=None, repository="a-fork")))
    assert len(server.comments) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"manifest": None}, "has not finished"),
        ({"state": BundleState.BROKEN}, "does not verify"),
        ({"body": "no marker"}, "must start with"),
        ({"body": MARKER + "x" * 65_535}, "at most 65535"),
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_written(
    changes: dict[str, Any], words: str, server: FakeGitHub, result: Result
) -> None:
    with pytest.raises((EvidenceError, InputError), match=words):
        _publish(server, replace(result, **changes))
    assert server.writes == []


def test_a_rate_limit_is_waited_for_and_the_request_sent_once_more(
    server: FakeGitHub, result: Result
) -> None:
    server.faults = [
        Fault(403, (("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1")), only="GET"),
        Fault(429, (("retry-after", "0"),), only="POST"),
    ]
    said: list[str] = []
    with open_client(access_to(server), say=said.append) as client:
        publish(client, NAME, result, Wanted())
    assert said == ["GitHub's rate limit is reached; going on in 0 s"] * 2
    assert [c["body"] for c in server.comments] == [BODY]


def test_a_wait_over_the_limit_ends_in_words(server: FakeGitHub, result: Result) -> None:
    server.faults = [Fault(429, (("retry-after", "3000"),))]
    with pytest.raises(ServiceError, match=r"rate limit \(429: refused\); run the command again in 3000 s"):
        _publish(server, result)


def test_a_rate_limit_that_stays_ends_after_three_tries(server: FakeGitHub, result: Result) -> None:
    server.faults = [Fault(429, (("retry-after", "0"),))] * 9
    with pytest.raises(ServiceError, match="rate limit"):
        _publish(server, result)
    assert len(server.seen) == 4


def test_a_read_is_tried_again_after_an_outage_but_a_write_is_not(server: FakeGitHub, result: Result) -> None:
    server.faults = [Fault(502, only="GET"), Fault(502, only="POST")]
    with pytest.raises(ServiceError, match=r"refused POST /repos/o/r/issues/61867/comments \(502"):
        _publish(server, result)
    assert [s.method for s in server.seen].count("POST") == 1


def test_a_check_run_that_is_refused_tells_that_the_comment_was_written(
    server: FakeGitHub, result: Result
) -> None:
    server.faults = [Fault(403, message="Resource not accessible", only="POST /repos/o/r/check-runs")]
    with pytest.raises(ServiceError) as refusal:
        _publish(server, result)
    text = str(refusal.value)
    assert "`checks: write` and a token of a GitHub App" in text
    assert "(already written: https://github.example/o/r/pull/1#100)" in text


def test_a_redirect_is_not_followed(server: FakeGitHub, result: Result) -> None:
    with serve_github(github()) as elsewhere:
        server.faults = [Fault(301, (("location", f"{elsewhere.url}/repos/o/r/pulls/61867"),))]
        with pytest.raises(ServiceError, match="redirect, which is not followed"):
            _publish(server, result)
        assert elsewhere.seen == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(401, message="Bad credentials"),
        Fault(404),
        Fault(500, raw=b"<html>", only="POST"),
        Fault(200, raw=b"{"),
        Fault(200, raw=b'{"head": {"sha": "../../x"}, "base": {"sha": 1}}'),
        Fault(200, raw=b'{"head": {"sha": "../../x"}, "base": {"sha": "y"}}'),
        Fault(200, raw=b"[" * 100_000),
        Fault(429, (("retry-after", "tomorrow"),)),
        Fault(422, message="\x1b[31m@everyone"),
    ],
)
def test_no_refusal_shows_the_token_or_acts_on_a_terminal(
    fault: Fault, server: FakeGitHub, result: Result
) -> None:
    server.faults = [fault]
    with pytest.raises(FasttrackError) as refusal:
        _publish(server, result)
    links: BaseException | None = refusal.value
    while links is not None:  # what a traceback would print
        assert TOKEN not in f"{links!r} {links}"
        links = links.__cause__
    assert "\x1b" not in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_server_that_is_not_there_is_told_in_words(result: Result) -> None:
    with serve_github(github()) as gone:
        pass
    with pytest.raises(ServiceError, match="no answer to GET /repos/o/r/pulls/61867"):
        _publish(gone, result)


def test_the_token_reaches_only_the_header(server: FakeGitHub, result: Result) -> None:
    done = _publish(server, result)
    assert {s.authorization for s in server.seen} == {f"token {TOKEN}"}
    assert TOKEN not in done.canonical().decode()
    assert all(TOKEN not in f"{s.path} {s.body}" for s in server.seen)


def test_every_request_and_answer_was_held_to_the_description(result: Result) -> None:
    """The control of the others: what GitHub does not document is noticed."""
    with serve_github(github()) as server:
        with open_client(access_to(server), say=lambda words: None) as client, pytest.raises(ServiceError):
            client.read("/repos/o/r/pulls/61867", dict, depth=3)
        assert server.violations == ["get /repos/{owner}/{repo}/pulls/{pull_number} has no parameter depth"]


def test_the_example_bundle_s_base_is_the_merge_base_and_not_the_branch_s_tip(server: FakeGitHub) -> None:
    assert server.base_tip != BASE
    assert server.merge_base == BASE
