"""The one comment: found again by its marker and its author, edited in place.

Invariant: a comment of somebody else is never taken for ours, whatever it says, because its author could
change it afterwards. Pure.
"""

from collections.abc import Sequence

from harness.domain.errors import InputError
from harness.forge.client import Answer
from harness.forge.pull_request import PullRequestName
from harness.forge.requests import MAX_BODY, ApiRequest, CommentBody
from harness.report.markdown import MARKER

__all__ = ["PER_PAGE", "Comment", "comment_path", "comment_requests", "comments_path", "own_comments"]

PER_PAGE = 100
SUPERSEDED = "This result of fasttrack was superseded by another comment on this pull request."


class Author(Answer):
    """Who wrote a comment."""

    login: str


class Comment(Answer):
    """A comment as GitHub gives it; `user` is missing where the account was deleted."""

    id: int
    html_url: str
    body: str | None = None
    user: Author | None = None


def comments_path(name: PullRequestName) -> str:
    """API path of a pull request's comments."""
    return f"{name.path}/issues/{name.number}/comments"


def comment_path(name: PullRequestName, comment: int) -> str:
    """API path of one comment."""
    return f"{name.path}/issues/comments/{comment}"


def own_comments(comments: Sequence[Comment], login: str | None) -> tuple[Comment, ...]:
    """Comments that start with the marker and were written by `login`, oldest first; none for no login."""
    if login is None:
        return ()
    return tuple(
        c
        for c in sorted(comments, key=lambda c: c.id)
        if c.user is not None and c.user.login.lower() == login.lower() and _normal(c.body).startswith(MARKER)
    )


def comment_requests(name: PullRequestName, body: str, own: Sequence[Comment]) -> tuple[ApiRequest, ...]:
    """What makes `body` the one comment of ours: nothing where it is already, else one new or one edit.

    Further ones, which two runs at once can leave, are edited to say that they are superseded. Raises
    `InputError` for a body without the marker or over GitHub's limit.
    """
    if not body.startswith(MARKER) or len(body) > MAX_BODY:
        raise InputError(
            f"the comment has {len(body)} characters and must start with {MARKER} and have at most "
            f"{MAX_BODY}; this is a fault of the report, so please report it"
        )
    if not own:
        return (ApiRequest(method="POST", path=comments_path(name), body=CommentBody(body=body)),)
    edits = [(own[0], body), *((c, SUPERSEDED) for c in own[1:])]
    return tuple(
        ApiRequest(method="PATCH", path=comment_path(name, c.id), body=CommentBody(body=text))
        for c, text in edits
        if _normal(c.body) != _normal(text)
    )


def _normal(body: str | None) -> str:
    """A body without what GitHub changes in storing it."""
    return (body or "").replace("\r\n", "\n").strip()
