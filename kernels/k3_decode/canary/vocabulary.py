"""The canary's 320 tokens, its facts, and the distractor of every token.

A token is a class plus an offset inside the class. Digits have a symbol of their own for each role and each
decimal place, which is what makes the chain learnable in minutes. Nothing here is drawn at run time: facts
come from one fixed seed, so that they can live in the weights only.
"""

import numpy as np
import numpy.typing as npt

__all__ = [
    "ADDEND",
    "ANSWER",
    "ASSISTANT",
    "BOS",
    "CHAIN",
    "CONTENT",
    "CONTENTS",
    "COUNT_HIGH",
    "COUNT_HIGHS",
    "COUNT_LOW",
    "COUNT_LOWS",
    "DIGIT",
    "DISTRACTOR",
    "END",
    "FACTS",
    "KEY",
    "LEFT",
    "ORDINAL",
    "ORDINALS",
    "PAD",
    "PREFIX",
    "QUERY",
    "RIGHT",
    "TOPIC",
    "TOPICS",
    "USER",
    "VERB",
    "VERBS",
    "VOCAB",
    "spell",
]

VOCAB = 320
PAD, BOS, USER, ASSISTANT, QUERY, PREFIX, END, CHAIN, ANSWER = range(9)
ORDINAL, ORDINALS = 16, 4
"""`ORDINAL + i`: the (i+1)-th of several like requests."""
VERB, VERBS = 24, 8
TOPIC, TOPICS = 32, 24
DIGIT = 56
"""`DIGIT + d`: a digit of the final integer."""
LEFT, RIGHT, ADDEND = 66, 96, 126
"""`LEFT + 10 * place + d`: digit d of a chain register or of what is added to it; place 0 is the units."""
KEY = 156
"""`KEY + d`: the key of an entry of the table in a chain's prompt."""
COUNT_LOW, COUNT_LOWS = 166, 16
COUNT_HIGH, COUNT_HIGHS = 182, 18
"""The countdown, 16 x high + low."""
CONTENT, CONTENTS = 200, 120
"""Symbols of which answers and prefixes are made."""

FACTS: npt.NDArray[np.int64] = np.random.default_rng(20_011).integers(0, 10, (100, 3))
"""`FACTS[10 * hundreds + tens]`: digits (units, tens, hundreds) that no prompt ever shows; the model has to
know them."""


def _distractors() -> npt.NDArray[np.int64]:
    successor = np.arange(VOCAB)
    for start, size in (
        *((DIGIT + 10 * i, 10) for i in range(10)),
        (COUNT_LOW, COUNT_LOWS),
        (CONTENT, CONTENTS),
    ):
        successor[start : start + size] = start + (np.arange(size) + 1) % size
    return successor


DISTRACTOR: npt.NDArray[np.int64] = _distractors()
"""The token that training gives the second place, close behind the right one: the next digit or the next
content symbol, cyclic in its class; itself for tokens that steer (END, ANSWER, ordinals, ...), which stay
clear-cut."""

_CLASSES = (
    ("ord", ORDINAL, ORDINALS),
    ("verb", VERB, VERBS),
    ("topic", TOPIC, TOPICS),
    ("d", DIGIT, 10),
    ("L", LEFT, 30),
    ("R", RIGHT, 30),
    ("add", ADDEND, 30),
    ("key", KEY, 10),
    ("low", COUNT_LOW, COUNT_LOWS),
    ("high", COUNT_HIGH, COUNT_HIGHS),
    ("c", CONTENT, CONTENTS),
)
_CONTROLS = ("PAD", "BOS", "USER", "ASSISTANT", "QUERY", "PREFIX", "END", "CHAIN", "ANSWER")


def spell(token: int) -> str:
    """A token as people read it, for example `R2:7` (right register, hundreds, 7) or `c41`; `?12` for an
    unused id."""
    if 0 <= token < len(_CONTROLS):
        return _CONTROLS[token]
    for name, start, size in _CLASSES:
        if start <= token < start + size:
            offset = token - start
            return f"{name}{offset // 10}:{offset % 10}" if size == 30 else f"{name}{offset}"
    return f"?{token}"
