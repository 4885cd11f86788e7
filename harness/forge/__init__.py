"""GitHub: read a pull request, publish a result."""

from harness.forge.pull_request import PullRequest, PullRequestName, parse_pull_request, read_pull_request

__all__ = ["PullRequest", "PullRequestName", "parse_pull_request", "read_pull_request"]
