"""The exchange protocols in every order of two ranks and in drawn orders of many, each with its faults."""

import pytest
from k3_decode.collectives.models import FAULTS, Fault, Launch, Plan, collective_models, model_of

from harness.measure.interleavings import explore, walk

LONG = Plan("long", (Launch(3), Launch(3, True), Launch(1), Launch(2, True)))
MODELS = {model.name: model for model in collective_models()}


@pytest.mark.parametrize("name", MODELS)
def test_no_order_of_two_ranks_hangs_or_reads_a_wrong_word(name: str) -> None:
    found = explore(MODELS[name], MODELS[name].ranks)
    assert (found.is_complete, found.fault) == (True, None)


def test_three_words_a_part_in_both_forms_are_right_in_every_order() -> None:
    model = model_of(LONG, 2)
    found = explore(model, model.ranks)
    assert (found.is_complete, found.fault) == (True, None)
    assert found.states > 10_000


@pytest.mark.parametrize("fault", Fault)
def test_every_planted_fault_goes_wrong_in_some_order_of_two_ranks(fault: Fault) -> None:
    model = model_of(FAULTS[fault], 2, fault)
    assert explore(model, model.ranks).fault is None
    assert explore(model, model.planted).fault is not None


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("fault", Fault)
def test_drawn_orders_of_many_ranks_are_right_and_show_every_fault(fault: Fault, ranks: int) -> None:
    model = model_of(FAULTS[fault], ranks, fault)
    seeds = range({4: 12, 8: 6, 16: 2}[ranks])
    assert [walk(model, model.ranks, seed) for seed in seeds] == [None] * len(seeds)
    assert any(walk(model, model.planted, seed) for seed in seeds)


def test_a_fast_rank_is_what_the_wrong_clean_up_loses() -> None:
    """The words (e + 1) mod 3 that a rank clears were written by the peer that is an epoch ahead."""
    model = model_of(FAULTS[Fault.CLEARS_NEXT], 2, Fault.CLEARS_NEXT)
    assert "deadlock" in (explore(model, model.planted).fault or "")


def test_a_fault_names_rank_thread_and_word() -> None:
    model = model_of(FAULTS[Fault.FLAG_FIRST], 2, Fault.FLAG_FIRST)
    fault = explore(model, model.planted).fault
    assert fault is not None
    assert fault.startswith("launch 0 reads what launch None left in part.1.0.0.1")
    assert "rank 1 thread 1 reads part.1.0.0.1" in fault
