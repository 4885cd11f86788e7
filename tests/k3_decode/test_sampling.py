"""Temperature, top-p and grammars."""

import json
import math

import pytest
import torch
from k3_decode.engine import EngineOptions
from k3_decode.sampling import Grammar, GrammarMissing, Sampling, TokenTexts, sample

from tests.k3_decode.models import TEXT, engine

DIGITS = TokenTexts({i: str(i) for i in range(10)} | {10: "-", 11: "x"}, end=12, vocab_size=13)
JSON = TokenTexts(dict(enumerate('{}":,abctruefals0123456789[] ')), end=40, vocab_size=41)


def draw(probabilities: list[float], options: Sampling, count: int) -> list[float]:
    """Frequencies of `count` draws."""
    rows = torch.tensor(probabilities).log().expand(count, -1)
    tokens = sample(rows, [options] * count, torch.Generator().manual_seed(0))
    return [tokens.count(i) / count for i in range(len(probabilities))]


def test_temperature_zero_takes_the_likeliest_and_the_lower_id_of_a_tie() -> None:
    rows = torch.tensor([[-1.0, -0.5, -0.5], [-0.1, -3.0, math.nan]])
    assert sample(rows, [Sampling(temperature=0)] * 2, torch.Generator()) == [1, 0]


def test_temperature_one_draws_by_probability() -> None:
    assert draw([0.2, 0.5, 0.3], Sampling(), 4000) == pytest.approx([0.2, 0.5, 0.3], abs=0.03)


def test_a_higher_temperature_flattens() -> None:
    """At temperature 2 odds are the square roots: 0.9 to 0.1 becomes 3 to 1."""
    assert draw([0.9, 0.1], Sampling(temperature=2.0), 4000) == pytest.approx([0.75, 0.25], abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    got = draw([0.5, 0.3, 0.15, 0.05], Sampling(top_p=0.7), 4000)
    assert got == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=0.03)
    assert got[2:] == [0.0, 0.0]
    assert draw([0.5, 0.3, 0.15, 0.05], Sampling(top_p=0.5), 100) == [1.0, 0.0, 0.0, 0.0]


def test_a_rows_token_does_not_depend_on_how_others_are_sampled() -> None:
    rows = torch.log_softmax(torch.randn(2, 50, generator=torch.Generator().manual_seed(1)), -1)
    warm = sample(rows, [Sampling(), Sampling()], torch.Generator().manual_seed(2))
    cold = sample(rows, [Sampling(temperature=0), Sampling()], torch.Generator().manual_seed(2))
    assert warm[1] == cold[1]


def test_a_row_of_nan_is_an_error_and_no_token() -> None:
    with pytest.raises(ValueError, match="row 0 has no finite log-probability"):
        sample(torch.full((1, 4), math.nan), [Sampling()], torch.Generator())


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_options_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="the first must be at least 0"):
        Sampling(**bad)


def test_a_grammar_leaves_only_what_may_follow() -> None:
    grammar = Grammar("-?[0-9]{2}", DIGITS)
    assert grammar.allowed().nonzero().flatten().tolist() == [*range(10), 10]
    grammar.advance(10)
    assert grammar.allowed().nonzero().flatten().tolist() == list(range(10))
    grammar.advance(4)
    with pytest.raises(ValueError, match="may not end here"):
        grammar.advance(12)
    grammar.rollback(1)
    grammar.advance(7)
    grammar.advance(1)
    assert grammar.is_finished
    assert grammar.allowed().nonzero().flatten().tolist() == [12]
    grammar.advance(12)
    with pytest.raises(ValueError, match="No next state"):
        grammar.advance(3)


def test_without_outlines_core_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "outlines_core", None)
    with pytest.raises(GrammarMissing, match="pip install outlines-core"):
        Grammar("a", DIGITS)
    with pytest.raises(GrammarMissing, match="pip install outlines-core"):
        Grammar.of_schema({"type": "boolean"}, DIGITS)


@pytest.mark.parametrize("is_on", [False, True])
def test_both_paths_serve_structured_output_at_a_temperature(is_on: bool) -> None:
    """An untrained model that must answer with JSON does."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = Grammar.of_schema(schema, TokenTexts(JSON.texts, end=40, vocab_size=320))
    served = engine(EngineOptions(max_requests=1, max_context=128, is_on=is_on))
    ids, logprobs = served.prefill([TEXT[:9]])
    generator, answer = torch.Generator().manual_seed(5), ""
    while True:
        (token,) = sample(logprobs, [Sampling(temperature=1.3, top_p=0.9)], generator, [grammar])
        if token == 40:
            break
        answer += JSON.texts[token]
        logprobs = served.decode(ids, [token])
    parsed = json.loads(answer)
    assert set(parsed) == {"a", "b"}
    assert isinstance(parsed["a"], bool)
    assert isinstance(parsed["b"], int)
