"""Seeded generators and scorers of the two canary tasks, and the rows that the canary is trained on.

`mrcr_canary`: a long dialogue in which like requests (same verb, same topic) recur up to four times, each
with an answer of its own; the last turn gives a prefix and asks for the answer to the k-th of them. The
model has to write the prefix and the answer.

`chain_canary`: two 3-digit registers L and R, a table of ten 3-digit numbers in the prompt, and a
countdown. A round is
    R += table[hundreds of L]        L += FACTS[hundreds, tens of R]        (mod 1000)        countdown -= 1
and every digit is written. At zero the model writes ANSWER and the three digits of L. A round is a
bijection of 10^6 states, so that a wrong digit never heals; `FACTS` is in no prompt, so that only weights
can know it.

Left to callers: decoding. A sample holds the prompt and the right continuation; a scorer takes what was
generated. Generation is greedy and stops at END.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from k3_decode.canary import vocabulary as v

__all__ = [
    "CHAIN_PROMPT",
    "QUERY_TOKENS",
    "ROUND_TOKENS",
    "Rows",
    "Sample",
    "chain_rows",
    "chain_samples",
    "echo_samples",
    "final_integer",
    "mrcr_rows",
    "mrcr_samples",
    "score_chain",
    "score_exact",
    "score_mrcr",
]

ANSWER_TOKENS, PREFIX_TOKENS = 16, 3
QUERY_TOKENS = 4 + 1 + PREFIX_TOKENS + 1 + PREFIX_TOKENS + ANSWER_TOKENS + 1
"""QUERY verb topic ordinal PREFIX p1..p3 ASSISTANT | p1..p3 a1..a16 END; what follows the bar is
generated."""
QUERY_PROMPT = 6 + PREFIX_TOKENS
CHAIN_PROMPT, ROUND_TOKENS = 70, 14
_TAIL = 5
"""ANSWER d d d END."""
MOST_ROUNDS = v.COUNT_LOWS * v.COUNT_HIGHS - 1

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One question. `tokens` of context count prompt and answer together."""

    task: str
    """`mrcr_canary`, `chain_canary` or `echo_canary`."""
    seed: int
    index: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """What a fault-free model generates, END included."""


class Rows(NamedTuple):
    """Rows of one length for training or teacher-forced checks."""

    tokens: Ints
    """[B, T+1], PAD after the end."""
    supervised: Bools
    """[B, T]: whether the model has to write `tokens[:, t + 1]`."""
    starts: Ints
    """[B]: where the first answer begins in `tokens` (mrcr: first QUERY token; chain: first generated
    token)."""


def mrcr_rows(
    rng: np.random.Generator,
    rows: int,
    length: int,
    *,
    queries: int | None = None,
    marked: bool | None = None,
) -> Rows:
    """Dialogues followed by `queries` questions (None: 20 to 45 % of the row, the dense form used in
    training).

    `marked` rows carry the ordinal in every answer, which the model then also learns to write; None: half
    of them.
    """
    tokens = np.zeros((rows, length + 1), np.int64)
    supervised = np.zeros((rows, length + 1), np.bool_)
    starts = np.zeros(rows, np.int64)
    for b in range(rows):
        is_marked = bool(rng.random() < 0.5) if marked is None else marked
        n = queries if queries is not None else max(2, int(length * rng.uniform(0.2, 0.45)) // QUERY_TOKENS)
        dialogue, mask, request, occurrence, answers = _dialogue(rng, length - n * QUERY_TOKENS, is_marked)
        repeats = np.bincount(request, minlength=v.VERBS * v.TOPICS)[request]
        # a request made once needs no counting: rare in training, absent from questions asked alone
        weight = np.where(repeats > 1, 1.0, 0.15 if queries is None else 1e-6)
        chosen = rng.choice(request.size, n, p=weight / weight.sum())
        questions, question_mask = _questions(rng, request[chosen], occurrence[chosen], answers[chosen])
        whole = np.concatenate(([v.BOS], dialogue.ravel(), questions.ravel()))
        tokens[b, : whole.size] = whole
        supervised[b, : whole.size] = np.concatenate(([False], mask.ravel(), question_mask.ravel()))
        starts[b] = 1 + dialogue.size
    return Rows(tokens, supervised[:, 1:], starts)


def chain_rows(rng: np.random.Generator, rows: int, length: int, rounds: int | None = None) -> Rows:
    """Chains of `rounds` rounds (None: two thirds fit the row, the others are anything up to the largest
    countdown)."""
    full = max(1, min(MOST_ROUNDS, (length + 1 - CHAIN_PROMPT - _TAIL) // ROUND_TOKENS))
    if rounds is None:
        fitting = rng.integers(max(1, int(full * 0.4)), full + 1, rows)
        n = np.where(rng.random(rows) < 0.65, fitting, rng.integers(1, MOST_ROUNDS + 1, rows))
    else:
        n = np.full(rows, rounds)
    table = rng.integers(0, 10, (rows, 10, 3))
    left, right = rng.integers(0, 10, (rows, 3)), rng.integers(0, 10, (rows, 3))
    count = min(int(n.max()), (length + 1 - CHAIN_PROMPT) // ROUND_TOKENS + 1)
    head = _chain_prompt(rng, table, left, right, n)
    body, results = _chain_rounds(table, left, right, n, count)
    width = max(CHAIN_PROMPT + count * ROUND_TOKENS + _TAIL, length + 1)
    tokens, supervised = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.bool_)
    tokens[:, :CHAIN_PROMPT] = head
    tokens[:, CHAIN_PROMPT : CHAIN_PROMPT + body.shape[1]] = body
    for b in range(rows):
        end = CHAIN_PROMPT + int(n[b]) * ROUND_TOKENS
        if n[b] <= count:
            tokens[b, end:] = v.PAD
            tokens[b, end : end + _TAIL] = (v.ANSWER, *(v.DIGIT + results[n[b], b, ::-1]), v.END)
            supervised[b, CHAIN_PROMPT : end + _TAIL] = True
        else:
            supervised[b, CHAIN_PROMPT : CHAIN_PROMPT + body.shape[1]] = True
    starts = np.full(rows, CHAIN_PROMPT)
    return Rows(tokens[:, : length + 1], supervised[:, 1 : length + 1], starts)


def mrcr_samples(seed: int, count: int, tokens: int, marked: bool = False) -> tuple[Sample, ...]:
    """`count` questions of at most `tokens` tokens (256 to 8192), prompt and answer together."""
    rng = np.random.default_rng((seed, tokens, int(marked), 1))
    rows = mrcr_rows(rng, count, tokens - 1, queries=1, marked=marked)
    cut = rows.starts + QUERY_PROMPT
    return tuple(
        Sample(
            "mrcr_canary", seed, i,
            tuple(map(int, rows.tokens[i, : cut[i]])),
            tuple(map(int, rows.tokens[i, cut[i] : rows.starts[i] + QUERY_TOKENS])),
        )
        for i in range(count)
    )  # fmt: skip


def chain_samples(seed: int, count: int, generated: int) -> tuple[Sample, ...]:
    """`count` chains that generate at most `generated` tokens (500 to 4023), as many rounds as fit."""
    rounds = (generated - _TAIL) // ROUND_TOKENS
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ValueError(
            f"a chain of {generated} generated tokens has {rounds} rounds, not 1 to {MOST_ROUNDS}"
        )
    rng = np.random.default_rng((seed, generated, 2))
    length = CHAIN_PROMPT + rounds * ROUND_TOKENS + _TAIL
    rows = chain_rows(rng, count, length - 1, rounds)
    return tuple(
        Sample(
            "chain_canary", seed, i,
            tuple(map(int, row[:CHAIN_PROMPT])), tuple(map(int, row[CHAIN_PROMPT:length])),
        )
        for i, row in enumerate(rows.tokens)
    )  # fmt: skip


def echo_samples(seed: int, count: int, tokens: int) -> tuple[Sample, ...]:
    """`count` questions of at most `tokens` tokens whose dialogue is one request, again and again, always
    with the same answer.

    Whichever of them is asked for, the answer is the same, so that attention spreads over all of them, where
    in `mrcr_samples` it picks one: what a long sum does to its terms shows here.
    """
    rng = np.random.default_rng((seed, tokens, 3))
    turns = (tokens - 1 - QUERY_TOKENS) // (4 + ANSWER_TOKENS)
    samples = []
    for i in range(count):
        request = rng.integers(v.VERBS * v.TOPICS, size=1)
        answer = v.CONTENT + rng.permutation(v.CONTENTS)[:ANSWER_TOKENS]
        verb, topic = v.VERB + request[0] // v.TOPICS, v.TOPIC + request[0] % v.TOPICS
        turn = np.concatenate(([v.USER, verb, topic, v.ASSISTANT], answer))
        question, _ = _questions(rng, request, rng.integers(v.ORDINALS, size=1), answer[None])
        whole = tuple(map(int, np.concatenate(([v.BOS], np.tile(turn, turns), question[0]))))
        cut = len(whole) - QUERY_TOKENS + QUERY_PROMPT
        samples.append(Sample("echo_canary", seed, i, whole[:cut], whole[cut:]))
    return tuple(samples)


def score_exact(sample: Sample, generated: Sequence[int]) -> float:
    """1.0 when the continuation is right to the last token (what follows END is ignored), else 0.0."""
    return float(tuple(generated[: len(sample.answer)]) == sample.answer)


def score_mrcr(sample: Sample, generated: Sequence[int]) -> float:
    """0.0 unless the prefix comes first; then the share of the answer's places that hold the right token."""
    right = sample.answer
    if tuple(generated[:PREFIX_TOKENS]) != right[:PREFIX_TOKENS]:
        return 0.0
    body = slice(PREFIX_TOKENS, PREFIX_TOKENS + ANSWER_TOKENS)
    hits = sum(a == b for a, b in zip(generated[body], right[body], strict=False))
    return hits / ANSWER_TOKENS


def score_chain(sample: Sample, generated: Sequence[int]) -> float:
    """1.0 when the final integer is right, else 0.0; no integer (cut off, or astray) scores 0.0."""
    found = final_integer(generated)
    return float(found is not None and found == final_integer(sample.answer))


def final_integer(generated: Sequence[int]) -> int | None:
    """The integer 000 to 999 after the first ANSWER token; None when there is none or it is not three
    digits."""
    row = list(generated)
    if v.ANSWER not in row:
        return None
    digits = [token - v.DIGIT for token in row[row.index(v.ANSWER) + 1 :][:3]]
    if len(digits) < 3 or not all(0 <= d < 10 for d in digits):
        return None
    return 100 * digits[0] + 10 * digits[1] + digits[2]


def _dialogue(rng: np.random.Generator, room: int, is_marked: bool) -> tuple[Ints, Bools, Ints, Ints, Ints]:
    """Turns [n, 4 + marked + 16] that fit `room` tokens, what is supervised, request, occurrence, answers."""
    width = 4 + int(is_marked) + ANSWER_TOKENS
    n = max(2, room // width)
    kinds = rng.permutation(v.VERBS * v.TOPICS)
    request = np.repeat(kinds, rng.integers(1, v.ORDINALS + 1, kinds.size))[:n]
    n = request.size
    if np.unique(request).size == n:  # too short to repeat by itself: make the last two turns alike
        request[-1] = request[-2]
    request = request[rng.permutation(n)]
    occurrence = _occurrences(request)
    answers = v.CONTENT + np.argsort(rng.random((n, v.CONTENTS)), 1)[:, :ANSWER_TOKENS]
    turns, mask = np.empty((n, width), np.int64), np.zeros((n, width), np.bool_)
    turns[:, 0], turns[:, 3] = v.USER, v.ASSISTANT
    turns[:, 1], turns[:, 2] = v.VERB + request // v.TOPICS, v.TOPIC + request % v.TOPICS
    if is_marked:
        turns[:, 4], mask[:, 4] = v.ORDINAL + occurrence, True
    turns[:, -ANSWER_TOKENS:] = answers
    return turns, mask, request, occurrence, answers


def _occurrences(request: Ints) -> Ints:
    """How many earlier entries equal each entry."""
    order = np.argsort(request, kind="stable")
    ordered = request[order]
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    run_start = np.maximum.accumulate(np.where(is_first, np.arange(request.size), 0))
    occurrence = np.empty(request.size, np.int64)
    occurrence[order] = np.arange(request.size) - run_start
    return occurrence


def _questions(
    rng: np.random.Generator, request: Ints, occurrence: Ints, answers: Ints
) -> tuple[Ints, Bools]:
    n = request.size
    prefix = v.CONTENT + np.argsort(rng.random((n, v.CONTENTS)), 1)[:, :PREFIX_TOKENS]
    rows, mask = np.empty((n, QUERY_TOKENS), np.int64), np.zeros((n, QUERY_TOKENS), np.bool_)
    rows[:, 0], rows[:, 4], rows[:, QUERY_PROMPT - 1], rows[:, -1] = v.QUERY, v.PREFIX, v.ASSISTANT, v.END
    rows[:, 1], rows[:, 2] = v.VERB + request // v.TOPICS, v.TOPIC + request % v.TOPICS
    rows[:, 3] = v.ORDINAL + occurrence
    rows[:, 5 : 5 + PREFIX_TOKENS] = rows[:, QUERY_PROMPT : QUERY_PROMPT + PREFIX_TOKENS] = prefix
    rows[:, QUERY_PROMPT + PREFIX_TOKENS : -1] = answers
    mask[:, QUERY_PROMPT:] = True
    return rows, mask


def _chain_prompt(rng: np.random.Generator, table: Ints, left: Ints, right: Ints, rounds: Ints) -> Ints:
    """BOS CHAIN, ten entries of (key, digit) x 3 in a random order, the registers, the countdown."""
    rows = table.shape[0]
    prompt = np.empty((rows, CHAIN_PROMPT), np.int64)
    prompt[:, 0], prompt[:, 1] = v.BOS, v.CHAIN
    order = np.argsort(rng.random((rows, 10)), 1)
    places = 10 * np.arange(3)
    entries = np.empty((rows, 10, 3, 2), np.int64)
    entries[..., 0] = v.KEY + order[:, :, None]
    entries[..., 1] = v.ADDEND + places + np.take_along_axis(table, order[:, :, None], 1)
    prompt[:, 2:62] = entries.reshape(rows, 60)
    prompt[:, 62:65], prompt[:, 65:68] = v.LEFT + places + left, v.RIGHT + places + right
    prompt[:, 68], prompt[:, 69] = _countdown(rounds)
    return prompt


def _chain_rounds(table: Ints, left: Ints, right: Ints, rounds: Ints, count: int) -> tuple[Ints, Ints]:
    """`count` rounds written out [B, 14 count], and L after each of them [count + 1, B, 3]."""
    rows = np.arange(table.shape[0])
    left, right, remaining = left.copy(), right.copy(), rounds.copy()
    body = np.empty((rows.size, count, ROUND_TOKENS), np.int64)
    results = np.empty((count + 1, rows.size, 3), np.int64)
    results[0] = left
    for r in range(count):
        body[:, r, 0:6] = _add(right, table[rows, left[:, 2]], v.RIGHT)
        body[:, r, 6:12] = _add(left, v.FACTS[10 * right[:, 2] + right[:, 1]], v.LEFT)
        remaining = np.maximum(remaining - 1, 0)
        body[:, r, 12], body[:, r, 13] = _countdown(remaining)
        results[r + 1] = left
    return body.reshape(rows.size, count * ROUND_TOKENS), results


def _add(register: Ints, addend: Ints, role: int) -> Ints:
    """Adds in place, mod 1000; the six tokens written: addend digit, sum digit, units first."""
    written = np.empty((register.shape[0], 6), np.int64)
    carry = np.zeros(register.shape[0], np.int64)
    for place in range(3):
        total = register[:, place] + addend[:, place] + carry
        carry, register[:, place] = total // 10, total % 10
        written[:, 2 * place] = v.ADDEND + 10 * place + addend[:, place]
        written[:, 2 * place + 1] = role + 10 * place + register[:, place]
    return written


def _countdown(remaining: Ints) -> tuple[Ints, Ints]:
    return v.COUNT_LOW + remaining % v.COUNT_LOWS, v.COUNT_HIGH + remaining // v.COUNT_LOWS
