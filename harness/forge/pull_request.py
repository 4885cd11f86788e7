"""A pull request as GitHub sees it: which commits it is about.

Text of a pull request (its title, its body, branch names) is never read; only ids are.
"""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from harness.domain.change import Sha
from harness.domain.errors import InputError, ServiceError
from harness.domain.record import Record
from harness.forge.client import Answer, Client, open_client, read_access

__all__ = [
    "PullRequest",
    "PullRequestName",
    "parse_pull_request",
    "read_pull_request",
    "selected_pull_request",
]

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]{0,38})/([A-Za-z0-9._-]{1,100})#([1-9][0-9]{0,8})")


class PullRequestName(NamedTuple):
    """OWNER/REPO#N."""

    owner: str
    repo: str
    number: int

    def __str__(self) -> str:
        return f"{self.owner}/{self.repo}#{self.number}"

    @property
    def path(self) -> str:
        """API path of the repository."""
        return f"/repos/{self.owner}/{self.repo}"


class PullRequest(Record):
    """The commits that a pull request is about."""

    owner: str
    repo: str
    number: int = Field(ge=1)
    base: Sha
    """Commit where the change starts: the merge base of head and the branch that it is meant for."""
    head: Sha

    @property
    def name(self) -> PullRequestName:
        """OWNER/REPO#N."""
        return PullRequestName(self.owner, self.repo, self.number)


class _Side(Answer):
    sha: str


class _Pull(Answer):
    base: _Side
    head: _Side


class _Comparison(Answer):
    merge_base_commit: _Side


def parse_pull_request(text: str) -> PullRequestName:
    """The name out of `OWNER/REPO#N`; raises `InputError`."""
    match = _NAME.fullmatch(text)
    if match is None or match[2] in (".", ".."):
        raise InputError(
            f"--pr {text[:80]!r} names no pull request; write it as OWNER/REPO#N, like octo/llm#42"
        )
    return PullRequestName(match[1], match[2], int(match[3]))


def read_pull_request(client: Client, name: PullRequestName) -> PullRequest:
    """Head and merge base of a pull request as they are now; raises `ServiceError`."""
    pull = client.read(f"{name.path}/pulls/{name.number}", _Pull)
    try:
        tips = PullRequest(
            owner=name.owner, repo=name.repo, number=name.number, base=pull.base.sha, head=pull.head.sha
        )
        compared = client.read(f"{name.path}/compare/{tips.base}...{tips.head}", _Comparison, per_page=1)
        return PullRequest.model_validate({**tips.model_dump(), "base": compared.merge_base_commit.sha})
    except ValidationError:
        raise ServiceError(f"{name}: GitHub names a commit that is none; try again later") from None


def selected_pull_request(text: str) -> PullRequest:
    """The pull request that a command line names, read with the environment's token or with none."""
    name = parse_pull_request(text)
    with open_client(read_access(), say=lambda words: None) as client:
        return read_pull_request(client, name)


def fetch_command(api: str, name: PullRequestName) -> str:
    """The git command that brings the pull request's commits into a clone."""
    host = (urlsplit(api).hostname or "").removeprefix("api.")
    return f"git fetch https://{host}/{name.owner}/{name.repo} refs/pull/{name.number}/head"
