"""AIME answers: known texts under lm-eval's rule and ours, and lm-eval's own code beside our account of
it.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.stages.evals.aime import find_integer, lm_eval_score, mark

KNOWN: tuple[tuple[str, int, int], ...] = (
    # text, score under lm-eval's rule, score under ours; the right answer is 70
    (r"\boxed{70}", 1, 1),
    ("70", 1, 1),
    ("$x=70$", 1, 1),
    (r"\boxed 70", 1, 1),
    (r"\boxed{070}", 0, 1),
    (r"\boxed{70.0}", 0, 1),
    (r"\boxed{\text{70}}", 0, 1),
    (r"\boxed{m+n=70}", 0, 1),
    ("the answer is 70.", 0, 1),
    ("**Answer: 70**", 0, 1),
    (r"\fbox{70}", 0, 1),
    (r"\boxed{70} and so \boxed{x}", 0, 1),
    (r"\boxed{71}", 0, 0),
    (r"\boxed{70} no, \boxed{71}", 0, 0),
    (r"\boxed{71} no, \boxed{70}", 1, 1),
    ("", 0, 0),
    ("I do not know.", 0, 0),
    (r"\boxed{}", 0, 0),
    (r"\boxed{70", 0, 0),
    (r"Thus $\boxed{70}$.", 1, 1),
    (r"so $n = \boxed{70}$ and we are done", 1, 1),
    (r"\boxed{ 70 }", 1, 1),
    (r"\boxed{70\!}", 1, 1),
    (r"\boxed{70^\circ}", 1, 1),
    (r"\boxed{70^{\circ}}", 1, 1),
    (r"\boxed{70\%}", 1, 1),
    (r"\boxed{\$70}", 1, 1),
    (r"\boxed{70\text{ degrees}}", 1, 0),
    (r"\boxed{\left70\right}", 1, 1),
    (r"\boxed{n=70}", 1, 1),
    (r"\boxed{k = 70}", 1, 1),
    (r"\boxed{abc=70}", 0, 1),
    (r"\boxed{\frac{140}{2}}", 0, 0),
    (r"\boxed{140/2}", 0, 0),
    (r"\boxed{-70}", 0, 0),
    (r"\boxed{70.5}", 0, 0),
    (r"\boxed{\mathbf{70}}", 0, 1),
    (r"\boxed{\textbf{(A)}\ 70}", 0, 0),
    ("$70$", 1, 1),
    ("$$70$$", 0, 1),
    ("First $a=3$, then $b=70$.", 0, 1),
    ("The answer is $70$.", 1, 1),
    ("Final answer: 070", 0, 1),
    ("answer = 70", 0, 1),
    ("The answer is 7 times 10.", 0, 0),
    ("70 is my guess", 0, 0),
    ("\n70\n", 1, 1),
    ("7 0", 1, 1),
    (r"\boxed{7\,0}", 0, 1),
    (r"The area is \boxed{70} square units. \boxed{70}", 1, 1),
    (r"\boxed{70}. But \boxed{", 0, 1),
    ("\uff10\uff17\uff10", 0, 1),  # full-width digits, as some models write them
)


@pytest.mark.parametrize(("text", "by_lm_eval", "by_us"), KNOWN)
def test_known_answers_score_as_both_rules_say(text: str, by_lm_eval: int, by_us: int) -> None:
    assert lm_eval_score(text, "70") == by_lm_eval
    assert (mark(text, "70", is_cut_off=False).kind == "right") == bool(by_us)


def _lm_eval_rule() -> Any:
    """lm-eval's own module, by its file: importing the package loads torch and more."""
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None:
        pytest.skip("the evals extra is not installed")
    file = Path(package.origin).parent / "tasks" / "aime" / "utils.py"
    spec = importlib.util.spec_from_file_location("lm_eval_aime_rule", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lm_eval_rule() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an escape in that file that newer Pythons warn of
        return _lm_eval_rule()


@pytest.mark.parametrize("text", [text for text, _, _ in KNOWN])
def test_known_answers_score_as_lm_eval_itself_says(text: str, lm_eval_rule: Any) -> None:
    own = lm_eval_rule.process_results({"answer": "70"}, [text])["exact_match"]
    assert lm_eval_score(text, "70") == own


PIECES = st.sampled_from(
    ["\\boxed", "\\boxed ", "\\fbox", "{", "}", "$", "70", "7", "0", " ", "=", "x", ".", "\\text{ ", "\\left",
     "\\!", "\\frac", "\\sqrt", "/", "\\%", "\\$", "\n", "^\\circ", "^{\\circ}", "\\\\", "tfrac"]
)  # fmt: skip


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_text_scores_as_lm_eval_itself_says(lm_eval_rule: Any, text: str) -> None:
    own = lm_eval_rule.process_results({"answer": "70"}, [text])["exact_match"]
    assert lm_eval_score(text, "70") == own


def test_cut_off_unanswered_and_wrong_stay_apart() -> None:
    assert mark("and so the answer is 70", "70", is_cut_off=True).kind == "truncated"
    assert mark(r"\boxed{70} and checking", "70", is_cut_off=True).kind == "right"
    assert mark("I give up", "70", is_cut_off=False).kind == "no_answer"
    assert mark(r"\boxed{71}", "70", is_cut_off=False) == ("wrong", 71)


def test_the_smallest_and_largest_answers_are_read() -> None:
    assert find_integer(r"\boxed{000}") == 0
    assert find_integer(r"\boxed{999}") == 999
