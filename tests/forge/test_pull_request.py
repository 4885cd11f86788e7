"""Which commits a pull request is about."""

import pytest

from harness.domain.errors import InputError
from harness.forge import PullRequest, PullRequestName, parse_pull_request, read_pull_request
from harness.forge.client import open_client
from harness.forge.pull_request import fetch_command, selected_pull_request
from tests.forge.github_server import serve_github
from tests.forge.material import BASE, HEAD, TIP, access_to, github


def test_a_pull_request_is_named_by_owner_repository_and_number() -> None:
    assert parse_pull_request("octo-org/vllm.fork_2#61867") == PullRequestName(
        "octo-org", "vllm.fork_2", 61867
    )
    assert str(PullRequestName("o", "r", 5)) == "o/r#5"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "o/r",
        "o/r#0",
        "o/r#-1",
        "o/r#1x",
        "o/..#1",
        "o/r#1234567890",
        "../x#1",
        "o/r/s#1",
        "o/r#1\n",
        "ö/r#1",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="write it as OWNER/REPO#N, like octo/llm#42"):
        parse_pull_request(text)


def test_the_base_is_the_merge_base_and_not_the_tip_of_the_branch() -> None:
    with serve_github(github()) as server:
        with open_client(access_to(server), say=lambda words: None) as client:
            pull = read_pull_request(client, PullRequestName("o", "r", 1))
        assert pull == PullRequest(owner="o", repo="r", number=1, base=BASE, head=HEAD)
        assert [s.path for s in server.seen] == ["/repos/o/r/pulls/1", f"/repos/o/r/compare/{TIP}...{HEAD}"]
        assert server.violations == []


def test_a_public_pull_request_is_read_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    monkeypatch.delenv("GH_TOKEN", raising=False)
    with serve_github(github()) as server:
        monkeypatch.setenv("GITHUB_API_URL", server.url)
        assert selected_pull_request("o/r#1").head == HEAD
        assert {s.authorization for s in server.seen} == {None}


def test_the_command_that_brings_the_commits_is_one_of_the_same_host() -> None:
    name = PullRequestName("o", "r", 7)
    assert fetch_command("https://api.github.com", name) == (
        "git fetch https://github.com/o/r refs/pull/7/head"
    )
    assert fetch_command("https://git.example/api/v3", name) == (
        "git fetch https://git.example/o/r refs/pull/7/head"
    )
