"""Evals of servers: what is planned, what is asked in a server's own tokens, and what its samples say."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness.domain.check import Samples, SampleTable, StageName
from harness.domain.machine import Tier
from harness.domain.policy import Proof
from harness.engines.served import ServedArm, ServerSettings
from harness.engines.vllm_server import VllmServer
from harness.stages.evals.conduct import Trouble
from harness.stages.evals.judging import _acceptance_figures, _with_words
from harness.stages.evals.served_asks import LINE, needle_asks, served_asks
from tests.fakes import requests

FAKE = Path(__file__).parents[2] / "fakes" / "model_server.py"


def samples(counters: tuple[tuple[str, str, int], ...], *settings: tuple[str, str, str]) -> Samples:
    columns = ("arm", "name", "value")
    return Samples(
        check="evals/x", tier=Tier.SMOKE,
        tables=(
            SampleTable(name="counters", columns=columns, rows=counters),
            SampleTable(name="settings", columns=columns, rows=settings),
        ),
    )  # fmt: skip


def test_an_acceptance_length_stands_with_its_label() -> None:
    counters = (("stock", "draft_steps", 10), ("stock", "accepted", 28))
    (figure,) = _acceptance_figures(samples(counters, ("stock", "acceptance", "synthetic")))
    assert (figure.name, figure.value) == ("stock_acceptance_length", 3.8)
    assert figure.note == "tokens a verify step, synthetic"


def test_no_drafts_means_no_acceptance_figure() -> None:
    assert _acceptance_figures(samples((("stock", "accepted", 0),))) == []


def test_answers_that_never_came_carry_the_servers_last_words() -> None:
    found = samples((), ("optimised", "failure", "the server died in mid-run: SIGSEGV"))
    trouble = Trouble("transport", "4 answers never came, first q1")
    assert _with_words(found, trouble).words.endswith("first q1: the server died in mid-run: SIGSEGV")
    assert _with_words(samples(()), trouble) == trouble


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Questions of two features, in the tokens of a fake server with a context of 128."""
    from harness.domain.check import Check
    from harness.stages.evals.planning import plan

    folder = tmp_path_factory.mktemp("served")
    settings = ServerSettings(
        model=str(folder), served_name="fake", program=(sys.executable, str(FAKE)),
        optimised=ServedArm(arguments=("--switch=on",)),
    )  # fmt: skip
    proof = Proof(stage=StageName.EVALS, subjects=("temperature_sampling_served", "full_context_served"))
    policy = requests.POLICY.model_copy(update={"proofs": (proof,)})
    planned: dict[str, Check] = {c.subject or "": c for c in plan(requests.plan_request(policy=policy))}
    with closing(VllmServer(settings, folder, folder)) as engine, engine.open("stock") as server:
        return {
            "checks": planned,
            "draws": served_asks(planned["temperature_sampling"], server),
            "needles": needle_asks(planned["full_context"], server),
        }


def test_a_served_feature_is_planned_for_servers_in_turn(asked: dict[str, object]) -> None:
    check = asked["checks"]["temperature_sampling"]  # type: ignore[index]
    parameters = dict(check.parameters)
    assert (parameters["engine"], parameters["model"], parameters["is_interleaved"]) == (
        "vllm",
        "served",
        False,
    )
    assert check.id == "evals/features/temperature_sampling/server"
    assert check.unavailable is None


def test_prompts_are_asked_in_the_servers_own_tokens(asked: dict[str, object]) -> None:
    first = asked["draws"][0]  # type: ignore[index]
    assert "".join(map(chr, first.tokens)) == "The three largest rivers of the country meet in a town that"


def test_the_needle_stands_at_the_beginning_in_the_middle_and_at_the_end(asked: dict[str, object]) -> None:
    needles = asked["needles"]
    texts = ["".join(map(chr, needle.ask.tokens)) for needle in needles]  # type: ignore[attr-defined]
    places = [text.index("the code of the green door is ") for text in texts]
    assert places == sorted(places)
    for text, needle in zip(texts, needles, strict=True):  # type: ignore[call-overload]
        assert f"is {needle.expected}." in text
        assert needle.expected not in "".join(map(chr, needle.without.tokens))
    assert LINE.format(n=1) in texts[0]
