"""How an answer went, whatever it says: failed, cut off, stuck in a run or a loop, or ended by itself.

A fault of numerics often shows here first, and a score would count it as one more wrong answer. Each kind is
counted apart; those that a request can only get from a failure count one by one, the others by whether the
optimised arm shows them more often than stock beyond chance.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Literal, NamedTuple

from harness.measure.paired import excess_p

__all__ = ["CONDUCT_SHARE", "FAILED_CONDUCT", "SOFT_CONDUCT", "Conduct", "Trouble", "conduct_of", "troubles"]

Conduct = Literal["ended", "truncated", "run", "loop", "no_answer", "error", "refusal", "transport"]
FAILED_CONDUCT: tuple[Conduct, ...] = ("error", "refusal", "transport")
SOFT_CONDUCT: tuple[Conduct, ...] = ("truncated", "run", "loop", "no_answer")
CONDUCT_SHARE = 1 / 80
"""What each soft kind takes of a check's false alarms, beside its scores: such answers are mostly wrong
ones, too.
"""
RUN_LENGTH = 48
"""Equal tokens in a row; no question here has an answer with more than a few."""
LOOP_PERIOD, LOOP_LENGTH, LOOP_TIMES = 96, 96, 6
"""A loop has a period up to this, covers at least so many tokens at the answer's end, and comes round so
often.
"""
MIN_LENGTHS = 8
"""Answers from which lengths are compared."""
_WORDS = {
    "error": "had no finite log-probability", "refusal": "were refused", "transport": "never came",
    "truncated": "were cut off", "run": "ended in a run of one token", "loop": "ended in a loop",
    "no_answer": "held no answer",
}  # fmt: skip


class Trouble(NamedTuple):
    """One kind of failure that is no wrong answer."""

    kind: str
    words: str


def conduct_of(finish: str, text: Sequence[Hashable]) -> Conduct:
    """Kind of one answer, from how it ended and its tokens (or words)."""
    if finish in ("error", "refusal", "transport"):
        return finish  # type: ignore[return-value]  # one of the three
    if _longest_run(text) >= RUN_LENGTH:
        return "run"
    if _is_loop(text):
        return "loop"
    return "truncated" if finish == "length" else "ended"


def troubles(
    stock: Mapping[str, Conduct],
    optimised: Mapping[str, Conduct],
    lengths: Sequence[tuple[int, int]],
    limits: Mapping[str, float],
) -> tuple[Trouble, ...]:
    """What is wrong with the optimised arm's conduct beside stock's, over the same items.

    `lengths` are (stock, optimised) of each item. `limits`: `false_alarm`, of each soft kind;
    `length_band`, the factor by which answers may be longer or shorter on average.
    """
    found = []
    for kind in FAILED_CONDUCT:
        items = [item for item, seen in optimised.items() if seen == kind]
        if items:
            found.append(Trouble(kind, f"{len(items)} answers {_WORDS[kind]}, first {items[0]}"))
    for kind in SOFT_CONDUCT:
        only_stock = sum(stock[i] == kind != optimised[i] for i in stock)
        only_optimised = sum(optimised[i] == kind != stock[i] for i in stock)
        if excess_p(only_stock, only_optimised) < CONDUCT_SHARE * limits["false_alarm"]:
            words = (
                f"{only_optimised} answers {_WORDS[kind]} and with stock were not, {only_stock} the other way"
            )
            found.append(Trouble(kind, words))
    ratio = _length_ratio(lengths)
    if ratio is not None and not 1 / limits["length_band"] <= ratio <= limits["length_band"]:
        band = limits["length_band"]
        words = f"answers are {ratio:.2f} times as long as stock's, beyond a factor of {band}"
        found.append(Trouble("length", words))
    return tuple(found)


def _length_ratio(lengths: Sequence[tuple[int, int]]) -> float | None:
    """Geometric mean of optimised over stock."""
    ratios = [log(max(1, b) / max(1, a)) for a, b in lengths]
    return exp(fmean(ratios)) if len(ratios) >= MIN_LENGTHS else None


def _longest_run(text: Sequence[Hashable]) -> int:
    """Longest run of one token anywhere."""
    best = run = 0
    for place, token in enumerate(text):
        run = run + 1 if place and text[place - 1] == token else 1
        best = max(best, run)
    return best


def _is_loop(text: Sequence[Hashable]) -> bool:
    """Whether the end repeats itself with a short period."""
    size = len(text)
    for period in range(2, min(LOOP_PERIOD, size // LOOP_TIMES) + 1):
        covered = max(LOOP_LENGTH, period * LOOP_TIMES)
        if covered <= size and all(text[i] == text[i - period] for i in range(size - covered + period, size)):
            return True
    return False
