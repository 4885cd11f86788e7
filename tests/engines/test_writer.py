"""Answers are written token by token, and end for a reason."""

from functools import partial
from math import inf, log, nan

import pytest
import torch

from harness.engines.writer import Writer, drawn_places

PIECES = (b"a", b"b", b"", b" c", b"ab")
STOP = 2


def _always(number: float, _place: int) -> float:
    return number


def _row(*shares: float) -> torch.Tensor:
    return torch.tensor([log(share) if share > 0 else -inf for share in shares])


def _written(tokens: list[int], **fields: object) -> Writer:
    """A writer that was given rows whose likeliest tokens these are."""
    writer = Writer(prompt=(0,), max_tokens=9, stop_token=STOP, pieces=PIECES, **fields)  # type: ignore[arg-type]  # fields by name
    for place, token in enumerate(tokens):
        if writer.finish is None:
            row = torch.full((5,), log(0.05))
            row[token] = log(0.8)
            writer.take(row, (place, "optimised/taken"))
    return writer


def test_a_stop_token_ends_an_answer_and_adds_no_text() -> None:
    writer = _written([0, 1, STOP, 0])
    assert (writer.text, writer.finish, writer.tokens) == (b"ab", "stop", [0, 1, 2])


def test_a_stop_text_across_tokens_ends_an_answer_before_it() -> None:
    writer = _written([0, 1, 3, 0], stop_texts=(b"b c",))
    assert (writer.text, writer.finish) == (b"a", "stop")


def test_of_two_stop_texts_the_first_in_the_text_counts() -> None:
    assert _written([0, 4], stop_texts=(b"b", b"aa")).text == b""


def test_the_limit_ends_an_answer_that_does_not_end_itself() -> None:
    writer = _written([0] * 20)
    assert (writer.finish, len(writer.tokens)) == ("length", 9)


@pytest.mark.parametrize("row", [_row(0, 0, 0, 0, 0), torch.tensor([0.0, nan, -1.0, -1.0, -1.0])])
def test_a_row_that_is_not_finite_ends_an_answer_with_an_error(row: torch.Tensor) -> None:
    writer = Writer(prompt=(0,), max_tokens=9, stop_token=STOP)
    writer.take(row, (1, ""))
    assert (writer.finish, writer.tokens) == ("error", [])


def test_a_draw_takes_the_token_whose_share_it_falls_into_likely_ones_first() -> None:
    chosen = []
    for number in (0.0, 0.49, 0.51, 0.79, 0.81, 0.9999):
        writer = Writer(
            prompt=(0,), max_tokens=9, stop_token=-1, temperature=1.0, number=partial(_always, number)
        )
        writer.take(_row(0.3, 0.5, 0.2, 0.0, 0.0), (1, ""))
        chosen += writer.tokens
    assert chosen == [1, 1, 0, 0, 2, 2]


def test_a_token_outside_the_grammar_is_never_chosen_and_every_choice_is_told() -> None:
    told: list[int] = []
    writer = Writer(prompt=(0,), max_tokens=2, stop_token=-1, allowed=lambda: [2, 4], advance=told.append)
    writer.take(_row(0.6, 0.1, 0.1, 0.0, 0.2), (1, ""))
    writer.take(_row(0.6, 0.1, 0.2, 0.0, 0.1), (2, ""))
    assert writer.tokens == told == [4, 2]
    assert 4 in dict(writer.likeliest[0])


def test_places_of_drawn_tokens_are_their_own_share_and_what_is_likelier() -> None:
    rows = torch.stack([_row(0.5, 0.3, 0.2), _row(0.1, 0.1, 0.8), torch.tensor([nan, nan, nan])])
    first, second, third = drawn_places(rows, [1, 2, 0], 1.0)
    assert first == pytest.approx((0.5, 0.3))
    assert second == pytest.approx((0.0, 0.8))
    assert third is None
    (hotter,) = drawn_places(rows[:1], [1], 2.0)
    weights = [0.5**0.5, 0.3**0.5, 0.2**0.5]
    assert hotter == pytest.approx((weights[0] / sum(weights), weights[1] / sum(weights)))
