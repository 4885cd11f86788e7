"""Questions of the official tasks, from rows in the schema of their data sets.

A row of `openai/mrcr` holds a chat as a JSON list in a string, the answer, and the random text that the
answer must begin with; a row of `math-ai/aime25` a problem and its integer. Rows of any length and any
Unicode text pass through as they are. What a row lacks is an error that names the row: a row is never
skipped in silence.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from harness.domain.errors import InputError
from harness.engines.serving import Message

__all__ = ["BANDS", "Question", "aime_prompt", "band_of", "pick_by_band", "read_aime", "read_mrcr"]

BANDS = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
"""Edges of MRCR's bands, tokens of prompt and answer together; a band holds its upper edge, the first
both.
"""
_MESSAGES = TypeAdapter(tuple[Message, ...])


class Question(NamedTuple):
    """One question of an official task."""

    id: str
    prompt: str
    """As lm-eval's task gives it: the chat's JSON for MRCR, the framed problem for AIME."""
    messages: tuple[Message, ...]
    """The chat; empty where the prompt is plain text."""
    target: str
    prefix: str = ""
    """What an answer must begin with."""
    context: int = 0
    """Tokens of prompt and answer together, under the length unit of the check."""
    document: Mapping[str, str] = {}
    """The row's fields that lm-eval's task reads."""


def aime_prompt(problem: str) -> str:
    """How lm-eval's task `aime25` asks a problem."""
    return f"Question: {problem}\nAnswer:"


def read_aime(rows: Iterable[Mapping[str, Any]]) -> tuple[Question, ...]:
    """Questions of `math-ai/aime25` rows, in order; raises `InputError` naming the first bad row."""
    questions = []
    for number, row in enumerate(rows):
        problem, answer = (_text(row, name, number) for name in ("problem", "answer"))
        if not answer.strip().isdigit() or int(answer) > 999:
            raise InputError(f"row {number} answers {answer[:40]!r}, which is no integer from 0 to 999")
        target = str(int(answer))
        document = {"problem": problem, "answer": target}
        name = str(row.get("id", number))
        questions.append(Question(name, aime_prompt(problem), (), target, document=document))
    return _distinct(questions)


def read_mrcr(
    rows: Iterable[Mapping[str, Any]], needles: int | None, count: Callable[[str], int]
) -> tuple[Question, ...]:
    """Questions of `openai/mrcr` rows with that many needles, None: any; `count` gives a text's tokens.

    Raises `InputError` naming the first bad row.
    """
    questions = []
    for number, row in enumerate(rows):
        prompt, answer, prefix = (
            _text(row, name, number) for name in ("prompt", "answer", "random_string_to_prepend")
        )
        if needles is not None and int(row.get("n_needles", needles)) != needles:
            continue
        messages = _parse_messages(prompt, number)
        if not prefix or not answer.startswith(prefix):
            raise InputError(
                f"row {number}: its answer does not begin with {prefix[:40]!r}, as the rule asks"
            )
        context = sum(count(message.content) for message in messages) + count(answer)
        document = {"prompt": prompt, "answer": answer, "random_string_to_prepend": prefix}
        questions.append(
            Question(
                f"{row.get('n_needles', needles)}needle-{number}",
                prompt,
                messages,
                answer,
                prefix,
                context,
                document,
            )
        )
    return _distinct(questions)


def band_of(context: int) -> str | None:
    """The band of a length, such as `8192-16384`; None outside all."""
    for low, high in pairwise(BANDS):
        if low < context <= high or context == BANDS[0]:
            return f"{low}-{high}"
    return None


def pick_by_band(questions: Sequence[Question], bands: Sequence[str], each: int) -> tuple[Question, ...]:
    """Up to `each` questions of each band, in the data's order, short bands first.

    Raises `InputError` for a band that the data lacks: an eval that leaves out the long ones would prove less
    than it says.
    """
    by_band: dict[str, list[Question]] = {band: [] for band in bands}
    for question in questions:
        band = band_of(question.context)
        if band in by_band and len(by_band[band]) < each:
            by_band[band].append(question)
    if empty := [band for band, found in by_band.items() if not found]:
        raise InputError(f"the data has no question of {', '.join(empty)} tokens, which the check asks for")
    return tuple(question for band in bands for question in by_band[band])


def _parse_messages(prompt: str, number: int) -> tuple[Message, ...]:
    try:
        messages = _MESSAGES.validate_python(json.loads(prompt))
    except (ValueError, ValidationError) as error:
        said = str(error).splitlines()[0]
        raise InputError(f"row {number}: its prompt is no JSON list of chat messages ({said})") from error
    if not messages or messages[-1].role != "user":
        raise InputError(f"row {number}: its chat does not end with the user's question")
    return messages


def _text(row: Mapping[str, Any], name: str, number: int) -> str:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"row {number} has no {name}, so it is not of the data set's schema")
    return str(value)


def _distinct(questions: Sequence[Question]) -> tuple[Question, ...]:
    ids = [question.id for question in questions]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise InputError(f"two rows have the id {twice[0]!r}; answers could not be told apart")
    if not questions:
        raise InputError("the data holds no question of this task")
    return tuple(questions)
