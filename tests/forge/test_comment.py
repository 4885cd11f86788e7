"""Which comments are ours, whatever they hold."""

import pytest

from harness.forge.comment import Author, Comment, own_comments
from harness.report.markdown import MARKER


def _comment(number: int, login: str | None, body: str | None) -> Comment:
    user = None if login is None else Author(login=login)
    return Comment(id=number, html_url="https://github.example/1", body=body, user=user)


def test_ours_are_by_our_account_and_start_with_the_marker_oldest_first() -> None:
    comments = [_comment(9, "Bot[bot]", f"\r\n{MARKER}\r\nnew"), _comment(3, "bot[bot]", f"{MARKER}\nold")]
    assert [c.id for c in own_comments(comments, "bot[BOT]")] == [3, 9]


@pytest.mark.parametrize(
    ("login", "body"),
    [
        ("bot", None), ("bot", ""), ("bot", f"> {MARKER}"), (None, MARKER), ("bot2", MARKER),
        ("other", f"{MARKER}\nadmitted"),
    ],
)  # fmt: skip
def test_anything_else_is_not(login: str | None, body: str | None) -> None:
    assert own_comments([_comment(1, login, body)], "bot") == ()


def test_without_an_account_none_is_ours() -> None:
    assert own_comments([_comment(1, "bot", MARKER)], None) == ()
