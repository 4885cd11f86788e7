"""How an answer becomes a score. Each scorer has an id and a version; scores under different ids are not
comparable.

Scorers are the harness's own: code under judgement never scores itself. Answers are token sequences for
embedded tasks and text for hub tasks; every rule takes either, as both are sequences.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

__all__ = ["SCORER_IDS", "exact", "mrcr", "mrcr_of_document", "score_tokens", "tail"]

SCORER_IDS = {
    "aime": "aime-integer/1",
    "exact": "exact/1",
    "lm_eval_aime25": "lm-eval-aime25/0.4.13",
    "mrcr": "mrcr-official/1",
    "tail": "tail/1",
}
"""Id and version by scorer name; part of every result."""


def exact(answer: Sequence[object], target: Sequence[object]) -> float:
    """1.0 when the answer is the target to the last element, else 0.0."""
    return float(list(answer) == list(target))


def mrcr(answer: Sequence[object], target: Sequence[object], prefix: Sequence[object]) -> float:
    """The rule published with `openai/mrcr`: 0 unless the answer starts with the prefix; then, with the
    prefix removed from both, the ratio of `difflib.SequenceMatcher` with its defaults (autojunk on)."""
    n = len(prefix)
    if list(answer[:n]) != list(prefix):
        return 0.0
    right = target[n:] if list(target[:n]) == list(prefix) else target
    return SequenceMatcher(None, answer[n:], right).ratio()


def mrcr_of_document(document: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """The rule as lm-eval's tasks call it: a row of the data set and the answers to it."""
    return {"mrcr": mrcr(results[0], document["answer"], document["random_string_to_prepend"])}


def tail(answer: Sequence[object], target: Sequence[object], count: int) -> float:
    """1.0 when the last `count` elements of answer and target are the same, else 0.0."""
    return float(len(answer) >= count and list(answer[-count:]) == list(target[-count:]))


def score_tokens(
    scorer: str, answer: Sequence[int], target: Sequence[int], prefix_tokens: int, tail_tokens: int
) -> float:
    """Score of one embedded item by scorer name; raises `KeyError` for a name that is no scorer of tokens."""
    if scorer not in ("exact", "mrcr", "tail"):
        raise KeyError(scorer)
    if scorer == "mrcr":
        return mrcr(answer, target, target[:prefix_tokens])
    if scorer == "tail":
        return tail(answer, target, tail_tokens)
    return exact(answer, target)
