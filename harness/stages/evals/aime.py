"""Whether an answer to an AIME problem is right: under lm-eval's own rule, and after normalising integers.

AIME answers are whole numbers from 0 to 999. `lm_eval_score` gives what lm-eval's task `aime25` gives
(0.4.13); a rule as strict about form as about values, so right answers score 0 where they are written
`\\boxed{070}`. `find_integer` reads the answer that people would read. Answers that were cut off, answers
that never came and wrong answers stay apart.
"""

import re
from typing import Literal, NamedTuple

__all__ = ["AimeMark", "find_integer", "lm_eval_score", "mark"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+([^\s$]+)")
_PHRASE = re.compile(
    r"(?:final\s+answer|answer)\s*(?:is|:|=|\bequals\b)?\s*[:=]?\s*\**\s*\$?\s*(-?\d[\d.]*)(?![\d/^])",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$+([^$]+)\$+")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathit|operatorname|bf|rm)\s*\{([^{}]*)\}")
_NOISE = re.compile(
    r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\^?\{?\\circ\}?|\\[%$]|[\s$*~]"
)
_WHOLE = re.compile(r"-?\d+(?:\.0*)?")


class AimeMark(NamedTuple):
    """What became of one answer."""

    kind: Literal["right", "wrong", "no_answer", "truncated"]
    found: int | None
    """The integer that was read; None where there is none."""


def mark(response: str, target: str, *, is_cut_off: bool) -> AimeMark:
    """The normalised verdict. Of an answer that was cut off only a box counts, as a sentence may be a
    thought.
    """
    found = _boxed_integer(response) if is_cut_off else find_integer(response)
    if found is None:
        return AimeMark("truncated" if is_cut_off else "no_answer", None)
    return AimeMark("right" if found == int(target) else "wrong", found)


def find_integer(response: str) -> int | None:
    """The integer that a response gives as its answer: the last box that holds one; else the last number
    called an answer; else the last formula, or the whole text, that is one.
    """
    boxed = _boxed_integer(response)
    if boxed is not None:
        return boxed
    phrases = [_integer(text) for text in _PHRASE.findall(response)]
    formulas = [_integer(text) for text in _MATH.findall(response)]
    for found in (phrases, formulas, [_integer(response)]):
        numbers = [number for number in found if number is not None]
        if numbers:
            return numbers[-1]
    return None


def lm_eval_score(response: str, target: str) -> float:
    """1.0 where lm-eval's `aime25` counts the response as right, else 0.0, for a target of digits alone.

    With such a target, whatever holds a fraction, a root or a quotient after the rule's rewriting is wrong,
    so that rewriting is left out here.
    """
    return float(_lm_eval_bare(_lm_eval_extract(response)) == target)


def _boxed_integer(response: str) -> int | None:
    found = [_integer(text) for text in _boxes(response)]
    numbers = [number for number in found if number is not None]
    return numbers[-1] if numbers else None


def _boxes(response: str) -> list[str]:
    """Contents of every box, in order; a box that never closes is none."""
    found = []
    for match in _BOX.finditer(response):
        if match.group(1) is not None:
            found.append(match.group(1))
        elif (content := _braced(response, match.end())) is not None:
            found.append(content)
    return found


def _braced(text: str, start: int) -> str | None:
    """What the braces that open at `start` hold."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    return None


def _integer(text: str) -> int | None:
    """The whole number that a formula states, its last side where it is an equation."""
    plain = text
    while (inner := _WRAPPED.sub(r"\1", plain)) != plain:
        plain = inner
    plain = _NOISE.sub("", plain).rpartition("=")[2].strip("{}").removesuffix(".")
    return int(plain.partition(".")[0]) if len(plain) < 12 and _WHOLE.fullmatch(plain) else None


def _lm_eval_extract(response: str) -> str:
    """What lm-eval takes for the answer: the last box, else what lies between the first and last dollar, else
    everything.
    """
    first, last = response.find("$"), response.rfind("$")
    answer = response if first == last else response[first + 1 : last]
    if "\\boxed " in response:
        return response.rpartition("\\boxed ")[2].partition("$")[0]
    start = response.rfind("\\boxed")
    if start < 0:  # an \fbox is found by that rule, and then refused for its name
        return answer
    depth = 0
    for place in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if response[place] == "}" and depth == 0:
            box = response[start : place + 1]
            return box[len("\\boxed{") : -1] if box.startswith("\\boxed{") else answer
    return answer


def _lm_eval_bare(answer: str) -> str | None:
    """The answer without what that rule ignores; None where its own rewriting gives up."""
    text = answer
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")):
        text = text.replace(old, new)
    for ignored in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(ignored, "")
    pieces = text.split("\\text{ ")
    if len(pieces) > 2:
        return None
    text = pieces[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    return text.replace(" ", "")
