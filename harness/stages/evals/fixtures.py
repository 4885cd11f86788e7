"""Generated rows in the schemas of the official data sets, asked in words that a small trained model knows.

The rows are the pack's own embedded questions, spelled: a dialogue of like requests becomes an
`openai/mrcr` row (its chat as a JSON list in a string, its prefix as the random text), a chain of steps to
one integer a `math-ai/aime25` row. So the official loading, prompting and scoring run on a CPU with a model
that can answer.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.domain.pack import EvalItem
from harness.engines.text_codec import WordCodec
from harness.stages.evals.aime import find_integer

__all__ = ["aime_rows", "mrcr_rows"]

REQUEST = slice(1, 3)
"""Verb and topic behind the token that begins a turn."""


def aime_rows(items: Sequence[EvalItem], codec: WordCodec) -> list[dict[str, Any]]:
    """Rows of chains: the spelled prompt, and the integer that the right answer states."""
    rows = []
    for item in items:
        answer = find_integer(codec.decode(item.target))
        if answer is None:
            raise ValueError(f"{item.id} ends in no integer, so it is no chain")
        rows.append({"id": item.id, "problem": codec.spell(item.prompt), "answer": str(answer)})
    return rows


def mrcr_rows(items: Sequence[EvalItem], codec: WordCodec) -> list[dict[str, Any]]:
    """Rows of dialogues, with the number of like requests in each."""
    return [_mrcr_row(item, codec) for item in items]


def _mrcr_row(item: EvalItem, codec: WordCodec) -> dict[str, Any]:
    words = codec.words
    turns = _turns(item.prompt, codec)
    messages = [{"role": role, "content": codec.spell(tokens)} for role, tokens in turns]
    requests = Counter(tuple(tokens[:2]) for role, tokens in turns[:-1] if role == "user")
    question = turns[-1][1]
    prefix = codec.decode(item.target[: words.prefix_tokens])
    answer = codec.decode(item.target)
    return {
        "prompt": json.dumps(messages, ensure_ascii=False),
        "answer": answer,
        "random_string_to_prepend": prefix,
        "n_needles": requests[tuple(question[REQUEST])],
        "desired_msg_index": question[3] - words.ordinal,
        "total_messages": len(messages),
        "n_chars": sum(len(message["content"]) for message in messages),
        "date_added": "generated",
    }


def _turns(prompt: Sequence[int], codec: WordCodec) -> list[tuple[str, tuple[int, ...]]]:
    """(role, tokens) of each turn, the question last, without the tokens that only steer."""
    words = codec.words
    turns: list[tuple[str, list[int]]] = []
    for token in prompt[1:-1]:  # what begins the chat, and what asks for the answer
        if token == words.query:
            turns.append(("user", [token]))
        elif token in (words.user, words.assistant):
            turns.append(("user" if token == words.user else "assistant", []))
        else:
            turns[-1][1].append(token)
    return [(role, tuple(tokens)) for role, tokens in turns]
