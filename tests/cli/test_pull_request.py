"""`--pr` gives a plan of exactly the pull request's range, and says how to get commits that are not there."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.selectors import Selection, make_selected_plan
from harness.domain.errors import InputError
from tests.forge.github_server import FakeGitHub, serve_github

ARGUMENTS = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")


def _git(repo: Path, *words: str) -> str:
    done = subprocess.run(["git", *ARGUMENTS, *words], cwd=repo, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit(repo: Path, name: str) -> str:
    (repo / name).write_text(name)
    _git(repo, "add", name)
    _git(repo, "commit", "-q", "-m", name)
    return _git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    made = tmp_path / "repo"
    made.mkdir()
    _git(made, "init", "-q", "-b", "main")
    return made


@pytest.fixture
def pull(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGitHub]:
    """A branch of two commits from the first commit of main, which has gone on since."""
    start = _commit(repo, "start.txt")
    tip = _commit(repo, "later.txt")
    _git(repo, "checkout", "-q", "-b", "feature", start)
    _commit(repo, "one.txt")
    head = _commit(repo, "two.txt")
    with serve_github(FakeGitHub(base_tip=tip, merge_base=start, head=head)) as server:
        monkeypatch.setenv("GITHUB_API_URL", server.url)
        monkeypatch.delenv("GITHUB_TOKEN", raising=False)
        monkeypatch.delenv("GH_TOKEN", raising=False)
        yield server
        assert server.violations == []


def _selection(repo: Path) -> Selection:
    return Selection("k3_decode", "smoke", repo, "HEAD~1", "HEAD", "smoke", ("isolation",), pr="octo/llm#42")


def test_the_plan_is_about_every_commit_of_the_pull_request(repo: Path, pull: FakeGitHub) -> None:
    change = make_selected_plan(_selection(repo)).change
    assert (change.pr, change.base, change.head) == (42, pull.merge_base, pull.head)
    assert [f.path for f in change.files] == ["one.txt", "two.txt"]


def test_commits_that_are_not_in_the_clone_are_asked_for_with_the_command(
    repo: Path, pull: FakeGitHub
) -> None:
    pull.head = "d" * 40
    with pytest.raises(InputError, match=r"git fetch https://127\.0\.0\.1/octo/llm refs/pull/42/head"):
        make_selected_plan(_selection(repo))


def test_a_range_beside_a_pull_request_is_refused(repo: Path, pull: FakeGitHub) -> None:
    with pytest.raises(InputError, match="leave out --base and --head, or --pr"):
        make_selected_plan(replace(_selection(repo), base="main"))
    assert pull.seen == []


def test_another_checkout_than_the_pull_request_s_head_is_dirty(repo: Path, pull: FakeGitHub) -> None:
    _git(repo, "checkout", "-q", "main")
    with pytest.raises(InputError, match="the working tree differs from"):
        make_selected_plan(_selection(repo))
