"""A pack's model behind the protocol that evals speak."""

import pytest

from harness.domain.pack import SessionRequest
from harness.engines.in_process_engine import InProcessEngine
from harness.engines.serving import Ask
from harness.engines.text_codec import TokenCodec
from tests.fakes.pack import FakePack, Faults


def _fake_engine(**fields: int) -> InProcessEngine:
    request = SessionRequest(model="tiny", arm="stock", max_requests=8, max_context=99, **fields)
    return InProcessEngine(FakePack(), request, TokenCodec(-1), "mix")


def test_answers_of_both_arms_draw_the_same_tokens_from_the_same_seed() -> None:
    asks = [Ask(item=str(n), tokens=(3, n), max_tokens=9, temperature=1.0, seed=5) for n in range(4)]
    found = {}
    for arm in ("stock", "optimised"):
        with _fake_engine().open(arm) as server:
            found[arm] = [reply.tokens for reply in server.answer(asks)]
    assert found["stock"] == found["optimised"]
    with _fake_engine().open("stock") as server:
        again = server.answer([ask.model_copy(update={"seed": 6}) for ask in asks])
    assert [reply.tokens for reply in again] != found["stock"]


def test_a_reply_tells_step_path_and_likeliest_tokens_of_every_position() -> None:
    with _fake_engine().open("optimised") as server:
        (reply,) = server.answer([Ask(item="a", tokens=(3, 4), max_tokens=4)])
        ledger = server.ledger()
    assert reply.steps[0] is None
    assert set(reply.paths[1:]) == {"optimised/taken"}
    assert len(reply.likeliest) == len(reply.tokens)
    assert all(told[0][0] == token for told, token in zip(reply.likeliest, reply.tokens, strict=True))
    decoded = {kind: tokens for kind, tokens in ledger.items() if kind.phase == "decode"}
    assert {(kind.path, kind.requests) for kind in decoded} == {("optimised", 1)}
    assert sum(decoded.values()) == len(reply.tokens) - 1


def test_a_nan_ends_an_answer_with_an_error_and_is_never_a_token() -> None:
    request = SessionRequest(model="tiny", arm="optimised", max_requests=1, max_context=99)
    engine = InProcessEngine(FakePack(Faults(nan_from_step=2)), request, TokenCodec(-1), "mix")
    with engine.open("optimised") as server:
        (reply,) = server.answer([Ask(item="a", tokens=(3, 4), max_tokens=9)])
    assert reply.finish == "error"
    assert len(reply.tokens) == 3


def test_an_arm_that_the_engine_cannot_open_is_an_error() -> None:
    with pytest.raises(ValueError, match="arm 'oracle' is none of"), _fake_engine().open("oracle"):
        pass


def test_stock_states_the_probabilities_of_what_another_arm_drew() -> None:
    asks = [Ask(item=str(n), tokens=(3, n), max_tokens=6, temperature=1.0, seed=2) for n in range(2)]
    with _fake_engine().open("optimised") as server:
        replies = server.answer(asks)
    with _fake_engine().open("stock") as stock:
        stated = stock.stated(asks, replies)
    assert [len(draws) for draws in stated] == [6, 6]
    for draws, reply in zip(stated, replies, strict=True):
        for draw, token, told in zip(draws, reply.tokens, reply.likeliest, strict=True):
            assert draw is not None
            assert 0 <= draw.above < 1
            assert draw.own == pytest.approx(2.718281828 ** dict(told)[token], rel=1e-4)


def test_the_description_of_an_arm_is_everything_that_its_session_was_asked_for() -> None:
    said = dict(_fake_engine(kept_prefixes=2).description("poison"))
    assert said["poisoned_op"] == '"mix"'
    assert said["kept_prefixes"] == "2"
    assert said["arm"] == '"optimised"'
    assert dict(_fake_engine().description("stock"))["arm"] == '"stock"'
