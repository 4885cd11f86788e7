"""Serving: paths, speculation, prefixes, isolation of state, and what a session leaves behind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_decode.decode import calls_of_a_step
from k3_decode.dispatch import Decision, Reason
from k3_decode.engine import Engine, EngineOptions
from k3_decode.ops.contract import OP_NAMES
from k3_decode.oracle import TOKEN_KL_BOUND
from k3_decode.shapes import NANO
from k3_decode.state import OutOfRoom

from tests.k3_decode.models import TEXT, divergence, engine, oracle_logprobs, text
from tests.k3_decode.op_errors import same_bits

PROMPT = TEXT[:20]


def served(*, is_on: bool = True, observer: list[Decision] | None = None, **options: object) -> Engine:
    known = {"max_requests": 3, "max_context": 80, "drafts": 3, "is_on": is_on, **options}
    listen = None if observer is None else observer.append
    return engine(EngineOptions(**known), observer=listen)  # type: ignore[arg-type]


def follow(target: Engine, ids: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after each token, decoded one at a time."""
    return torch.cat([target.decode(ids, [token]) for token in tokens])


def test_decode_takes_the_optimised_path_and_prefill_does_not() -> None:
    log: list[Decision] = []
    target = served(observer=log)
    ids, _ = target.prefill([PROMPT])
    target.decode(ids, [1])
    target.verify(ids, [[2, 3]], [2])
    assert [(d.phase, d.path, d.reason, d.rows, d.layer_paths) for d in log] == [
        ("prefill", "stock", Reason.PHASE_NOT_CLAIMED, 20, "ssssss"),
        ("decode", "optimised", Reason.TAKEN, 1, "oooooo"),
        ("verify", "optimised", Reason.TAKEN, 2, "oooooo"),
    ]
    assert [d.step for d in log] == [0, 1, 2]
    assert (log[2].context_min, log[2].context_max, log[2].drafts, log[2].tokens) == (23, 23, 1, 2)


def test_each_step_launches_what_its_layers_call() -> None:
    target = served()
    ids, _ = target.prefill([PROMPT, PROMPT[:3]])
    assert target.launches() == {}
    target.decode(ids, [1, 2])
    assert target.launches() == calls_of_a_step(NANO)
    assert set(target.launches()) == set(OP_NAMES)


def test_with_the_switch_off_no_op_is_launched() -> None:
    target = served(is_on=False)
    ids, _ = target.prefill([PROMPT])
    target.decode(ids, [1])
    assert target.launches() == {}


def test_switching_paths_inside_a_request_changes_no_answer() -> None:
    target = served(is_on=False)
    ids, _ = target.prefill([PROMPT])
    answers = []
    for i, token in enumerate(TEXT[20:32]):
        target.switch(is_on=i % 4 < 2)
        answers.append(target.decode(ids, [token]))
    drift = divergence(oracle_logprobs()[20:32], torch.cat(answers))
    assert float(drift.max()) < TOKEN_KL_BOUND
    assert target.launches()["kda_step"] == 6 * 4


@pytest.mark.parametrize("op", OP_NAMES)
def test_poisoning_any_op_shows_in_the_answers(op: str) -> None:
    poisoned = served(poisoned_op=op)
    ids, _ = poisoned.prefill([PROMPT])
    drift = divergence(oracle_logprobs()[20:24], follow(poisoned, ids, TEXT[20:24]))
    assert float(drift.max()) > 5 * TOKEN_KL_BOUND


@pytest.mark.parametrize("is_on", [False, True])
@settings(max_examples=4, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4))
def test_rejected_drafts_leave_no_trace(is_on: bool, plan: list[tuple[int, int]]) -> None:
    """Verify steps of changing size, wrong drafts behind the kept rows, a decode step at the end."""
    target = served(is_on=is_on)
    ids, _ = target.prefill([PROMPT])
    at = 20
    for size, wanted in plan:
        kept = min(size, wanted)
        rows = [*TEXT[at : at + kept], *((token + 1) % 320 for token in TEXT[at + kept : at + size])]
        answers = target.verify(ids, [rows], [kept])
        assert float(divergence(oracle_logprobs()[at : at + kept], answers[:kept]).max()) < TOKEN_KL_BOUND
        at += kept
        assert target.lengths(ids) == [at]
    last = target.decode(ids, [TEXT[at]])
    assert float(divergence(oracle_logprobs()[at : at + 1], last).max()) < TOKEN_KL_BOUND


def test_uneven_verify_rows_are_declined_and_answered_by_stock() -> None:
    log: list[Decision] = []
    target = served(observer=log)
    ids, _ = target.prefill([PROMPT, PROMPT])
    answers = target.verify(ids, [TEXT[20:23], TEXT[20:21]], [3, 1])
    assert (log[-1].path, log[-1].reason) == ("stock", Reason.ROWS_NOT_UNIFORM)
    truth = oracle_logprobs()
    expected = torch.cat((truth[20:23], truth[20:21]))
    assert float(divergence(expected, answers).max()) < TOKEN_KL_BOUND


@pytest.mark.parametrize("kept", [0, 3])
def test_a_verify_step_must_keep_between_one_and_all_of_its_rows(kept: int) -> None:
    target = served()
    ids, _ = target.prefill([PROMPT])
    with pytest.raises(ValueError, match=f"2 rows of which {kept} are kept"):
        target.verify(ids, [[1, 2]], [kept])


def test_a_prompt_as_long_as_a_verify_step_is_still_a_prefill() -> None:
    """A dispatcher that guessed the phase from shapes would take these for drafts."""
    for length in range(1, 9):
        log: list[Decision] = []
        target = served(observer=log)
        ids, _ = target.prefill([TEXT[:length]])
        assert (log[0].phase, log[0].path) == ("prefill", "stock")
        answer = target.decode(ids, [TEXT[length]])
        assert float(divergence(oracle_logprobs()[length : length + 1], answer)) < TOKEN_KL_BOUND


def test_a_kept_prefix_gives_the_same_answers_and_counts_as_a_hit() -> None:
    prompt = text(71, 3)
    cold = served(max_requests=2, max_context=90)
    ids, first = cold.prefill([prompt])
    expected = torch.cat((first, follow(cold, ids, prompt[:3])))

    warm = served(max_requests=2, max_context=90, kept_prefixes=2)
    seen, _ = warm.prefill([prompt])
    ids, first = warm.prefill([prompt])
    assert (warm.prefixes.queries, warm.prefixes.hits, warm.prefixes.reused_tokens) == (2, 1, 64)
    got = torch.cat((first, follow(warm, ids, prompt[:3])))
    assert float(divergence(expected, got).max()) < TOKEN_KL_BOUND
    warm.finish([*ids, *seen])
    again, _ = warm.prefill([[*prompt[:64], 5]])
    assert warm.prefixes.hits == 2
    warm.finish(again)


def test_kept_prefixes_give_way_when_requests_need_their_pages() -> None:
    target = served(max_requests=2, max_context=130, drafts=0, kept_prefixes=1)
    first, _ = target.prefill([text(70, 4)])
    target.finish(first)
    ids, _ = target.prefill([text(129, 5), text(129, 6)])
    assert target.lengths(ids) == [129, 129]


def test_more_requests_than_slots_are_refused_and_leave_nothing_behind() -> None:
    target = served(max_requests=2)
    with pytest.raises(OutOfRoom, match="no slot is free"):
        target.prefill([PROMPT, PROMPT, PROMPT])
    ids, _ = target.prefill([PROMPT, PROMPT])
    assert len(ids) == 2


def test_a_request_cannot_outgrow_the_sessions_context() -> None:
    target = served(max_context=24, drafts=0)
    ids, _ = target.prefill([TEXT[:24]])
    with pytest.raises(OutOfRoom, match="would reach 25 tokens; the session holds 24"):
        target.decode(ids, [1])


def test_a_prompt_that_comes_twice_is_computed_once_and_answers_twice() -> None:
    log: list[Decision] = []
    target = served(observer=log)
    ids, first = target.prefill([PROMPT, TEXT[:9], PROMPT])
    assert [d.tokens for d in log] == [20, 9]
    assert same_bits(first[0], first[2])
    answers = target.decode(ids, [TEXT[20], TEXT[9], 5])
    expected = torch.stack((oracle_logprobs()[20], oracle_logprobs()[9]))
    assert float(divergence(expected, answers[:2]).max()) < TOKEN_KL_BOUND
    assert float(divergence(answers[:1], answers[2:]).max()) > 0.1
    target.finish(ids)
    assert len(target.prefill([PROMPT, PROMPT, PROMPT])[0]) == 3


def test_kimi_linear_is_declined_and_answered_by_stock() -> None:
    log: list[Decision] = []
    target = engine(
        EngineOptions(max_requests=1, max_context=64, is_on=True), model="nano_linear", observer=log.append
    )
    ids, _ = target.prefill([PROMPT])
    answer = target.decode(ids, [TEXT[20]])
    assert (log[-1].path, log[-1].reason) == ("stock", Reason.MODEL_NOT_SUPPORTED)
    assert float(divergence(oracle_logprobs("nano_linear")[20:21], answer)) < TOKEN_KL_BOUND


def test_graphs_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="is_graph needs a GPU"):
        served(is_graph=True)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="each prompt at least one token"):
        served().prefill([PROMPT, []])


@pytest.mark.parametrize("is_on", [False, True])
def test_a_step_writes_only_what_it_declares(is_on: bool) -> None:
    target = served(is_on=is_on)
    ids, _ = target.prefill([PROMPT, TEXT[:9], TEXT[:30]])
    stepping = ids[:2]
    masks = target.writable(stepping)
    before = {name: tensor.clone() for name, tensor in target.watched().items()}
    target.decode(stepping, [1, 2])
    changed = set()
    for name, tensor in target.watched().items():
        fixed = ~masks.get(name, torch.zeros(tensor.shape, dtype=torch.bool))
        assert same_bits(tensor[fixed], before[name][fixed]), name
        if not same_bits(tensor, before[name]):
            changed.add(name)
    assert {
        "rank0.layers.3.kv_cache",
        "rank0.layers.0.conv_state",
        "rank0.layers.0.recurrent_state",
    } <= changed


def test_a_finished_requests_slots_start_clean_for_the_next_one() -> None:
    target = served(max_requests=1)
    ids, _ = target.prefill([text(40, 9)])
    target.decode(ids, [3])
    target.finish(ids)
    ids, _ = target.prefill([PROMPT])
    drift = divergence(oracle_logprobs()[20:21], target.decode(ids, [TEXT[20]]))
    assert float(drift.max()) < TOKEN_KL_BOUND


def test_closing_gives_the_thread_count_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        target = served()
        assert torch.get_num_threads() == 1
        target.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
