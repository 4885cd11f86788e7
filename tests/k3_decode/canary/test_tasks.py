"""The two canary tasks: what their questions look like, and what their scorers accept."""

import numpy as np
import pytest
from k3_decode.canary import vocabulary as v
from k3_decode.canary.tasks import (
    Sample,
    chain_rows,
    chain_samples,
    echo_samples,
    final_integer,
    mrcr_rows,
    mrcr_samples,
    score_chain,
    score_exact,
    score_mrcr,
)

CONTROLS = {v.PAD, v.BOS, v.USER, v.ASSISTANT, v.QUERY, v.PREFIX, v.END, v.CHAIN, v.ANSWER}


def _walk(prompt: tuple[int, ...]) -> tuple[int, int]:
    """(final integer, generated tokens) of a chain by plain integers, read from its prompt."""
    table: dict[int, int] = {}
    for place in range(2, 62, 2):
        key, (power, digit) = prompt[place] - v.KEY, divmod(prompt[place + 1] - v.ADDEND, 10)
        table[key] = table.get(key, 0) + digit * 10**power
    left = sum((prompt[62 + i] - v.LEFT - 10 * i) * 10**i for i in range(3))
    right = sum((prompt[65 + i] - v.RIGHT - 10 * i) * 10**i for i in range(3))
    rounds = prompt[68] - v.COUNT_LOW + 16 * (prompt[69] - v.COUNT_HIGH)
    facts = [int(units + 10 * tens + 100 * hundreds) for units, tens, hundreds in v.FACTS]
    for _ in range(rounds):
        right = (right + table[left // 100]) % 1000
        left = (left + facts[right // 10]) % 1000
    return left, 14 * rounds + 5


def test_a_chain_ends_in_the_integer_that_plain_arithmetic_gives() -> None:
    for sample in chain_samples(seed=11, count=8, generated=700):
        integer, generated = _walk(sample.prompt)
        assert final_integer(sample.answer) == integer
        assert len(sample.answer) == generated == 14 * 49 + 5


def test_the_first_round_of_a_chain_is_written_digit_by_digit() -> None:
    sample = chain_samples(seed=3, count=1, generated=19)[0]
    # in the prompt L = 340, R = 271, table[3] = 746: R becomes 1017 - 1000; FACTS[01] is 072: L becomes 412
    assert [v.spell(t) for t in sample.answer] == [
        "add0:6", "R0:7", "add1:4", "R1:1", "add2:7", "R2:0",
        "add0:2", "L0:2", "add1:7", "L1:1", "add2:0", "L2:4", "low0", "high0",
        "ANSWER", "d4", "d1", "d2", "END",
    ]  # fmt: skip


@pytest.mark.parametrize("generated", [500, 4023])
def test_chains_stay_inside_the_length_asked_for(generated: int) -> None:
    sample = chain_samples(seed=1, count=1, generated=generated)[0]
    assert generated - 14 < len(sample.answer) <= generated


def test_a_chain_longer_than_its_countdown_can_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4100 generated tokens has 292 rounds, not 1 to 287"):
        chain_samples(seed=1, count=1, generated=4100)


@pytest.mark.parametrize("tokens", [256, 1024, 8192])
def test_a_dialogue_answers_the_request_of_its_question_and_no_like_one(tokens: int) -> None:
    for sample in mrcr_samples(seed=5, count=4, tokens=tokens):
        assert tokens - 20 < len(sample.prompt) + len(sample.answer) <= tokens
        query, verb, topic, ordinal, prefix_mark, *prefix, assistant = sample.prompt[-9:]
        assert (query, prefix_mark, assistant) == (v.QUERY, v.PREFIX, v.ASSISTANT)
        turns = np.array(sample.prompt[1:-9]).reshape(-1, 20)
        like = turns[(turns[:, 1] == verb) & (turns[:, 2] == topic)]
        assert 2 <= len(like) <= 4
        right = like[ordinal - v.ORDINAL, 4:]
        assert sample.answer == (*prefix, *right, v.END)


def test_marked_answers_carry_their_ordinal() -> None:
    sample = mrcr_samples(seed=5, count=1, tokens=512, marked=True)[0]
    turns = np.array(sample.prompt[1:-9]).reshape(-1, 21)
    verb, topic = sample.prompt[-8:-6]
    like = turns[(turns[:, 1] == verb) & (turns[:, 2] == topic)]
    assert like[:, 4].tolist() == [v.ORDINAL + i for i in range(len(like))]


def test_the_same_seed_gives_the_same_questions_and_another_seed_others() -> None:
    assert mrcr_samples(1, 2, 256) == mrcr_samples(1, 2, 256)
    assert chain_samples(1, 2, 100) == chain_samples(1, 2, 100)
    assert mrcr_samples(1, 2, 256) != mrcr_samples(2, 2, 256)
    assert chain_samples(1, 2, 100) != chain_samples(2, 2, 100)


def test_training_rows_supervise_only_what_the_model_writes() -> None:
    rng = np.random.default_rng(0)
    chain = chain_rows(rng, 4, 200, rounds=3)
    assert chain.supervised.sum(1).tolist() == [14 * 3 + 5] * 4
    assert chain.supervised[:, :69].sum() == 0
    mrcr = mrcr_rows(rng, 4, 256, queries=2, marked=False)
    assert mrcr.supervised.sum(1).tolist() == [2 * 20] * 4


def test_every_symbol_has_one_meaning_and_fits_the_vocabulary() -> None:
    names = [v.spell(token) for token in range(v.VOCAB)]
    used = [name for name in names if not name.startswith("?")]
    assert len(used) == len(set(used)) == 309
    assert v.CONTENT + v.CONTENTS == v.VOCAB == 320


def test_a_distractor_is_the_next_symbol_of_its_class_and_steering_tokens_have_none() -> None:
    assert v.DISTRACTOR[v.DIGIT + 9] == v.DIGIT
    assert v.DISTRACTOR[v.LEFT + 10 + 3] == v.LEFT + 10 + 4
    assert v.DISTRACTOR[v.CONTENT + 119] == v.CONTENT
    assert all(v.DISTRACTOR[token] == token for token in CONTROLS)


SAMPLE = Sample("mrcr_canary", 0, 0, (1,), (200, 201, 202, *range(210, 226), v.END))


def test_an_answer_without_its_prefix_scores_nothing() -> None:
    assert score_mrcr(SAMPLE, SAMPLE.answer) == 1.0
    assert score_mrcr(SAMPLE, (200, 201, 203, *SAMPLE.answer[3:])) == 0.0


def test_an_answer_half_right_scores_half_and_is_not_exact() -> None:
    half = (*SAMPLE.answer[:11], *(v.PAD for _ in range(8)), v.END)
    assert score_mrcr(SAMPLE, half) == 0.5
    assert score_exact(SAMPLE, half) == 0.0
    assert score_exact(SAMPLE, (*SAMPLE.answer, v.PAD)) == 1.0


@pytest.mark.parametrize(
    ("generated", "integer"),
    [
        ((v.ANSWER, v.DIGIT + 0, v.DIGIT + 4, v.DIGIT + 2, v.END), 42),
        ((v.ANSWER, v.DIGIT + 0, v.DIGIT + 4), None),
        ((v.ANSWER, v.DIGIT + 0, v.END, v.DIGIT + 2), None),
        ((v.DIGIT + 1, v.DIGIT + 2, v.DIGIT + 3), None),
    ],
)
def test_the_final_integer_is_three_digits_after_the_answer_mark(
    generated: tuple[int, ...], integer: int | None
) -> None:
    assert final_integer(generated) == integer


def test_a_chain_scores_by_its_integer_alone() -> None:
    sample = Sample("chain_canary", 0, 0, (1,), (v.ADDEND, v.ANSWER, v.DIGIT + 1, v.DIGIT, v.DIGIT, v.END))
    assert score_chain(sample, (v.LEFT, v.ANSWER, v.DIGIT + 1, v.DIGIT, v.DIGIT, v.END)) == 1.0
    assert score_chain(sample, (v.ADDEND, v.ANSWER, v.DIGIT + 1, v.DIGIT, v.DIGIT + 1, v.END)) == 0.0
    assert score_chain(sample, (v.ADDEND,)) == 0.0


@pytest.mark.parametrize("tokens", [256, 1024])
def test_an_echo_repeats_one_request_and_its_answer_and_asks_for_it(tokens: int) -> None:
    first, second = echo_samples(seed=4, count=2, tokens=tokens)
    assert first.prompt != second.prompt
    for sample in (first, second):
        turns = (tokens - 1 - 29) // 20
        assert len(sample.prompt) + len(sample.answer) == 1 + 20 * turns + 29 <= tokens
        turn = sample.prompt[1:21]
        assert sample.prompt == (v.BOS, *turn * turns, *sample.prompt[-9:])
        assert sample.prompt[-9:-6] == (v.QUERY, *turn[1:3])
        assert sample.answer == (*sample.prompt[-4:-1], *turn[4:], v.END)
    assert echo_samples(seed=4, count=1, tokens=tokens) == (first,)
