"""Slots and pages: who owns what, what padding means, and prefixes that others share."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from k3_decode.shapes import NANO
from k3_decode.state import OutOfRoom, Pool, Request, Snapshot

CPU = torch.device("cpu")


def pool(*, max_requests: int = 2, max_context: int = 130, drafts: int = 2) -> Pool:
    return Pool(
        [NANO.rank(2)],
        max_requests=max_requests,
        max_context=max_context,
        drafts=drafts,
        kv_dtype="bf16",
        device=CPU,
    )


def test_slot_and_page_zero_belong_to_nobody() -> None:
    held = pool()
    requests = [held.admit(), held.admit()]
    for request in requests:
        held.reserve(request, 130)
    assert sorted(slot for request in requests for slot in request.slots) == [1, 2, 3, 4, 5, 6]
    assert sorted(page for request in requests for page in request.pages) == [1, 2, 3, 4, 5, 6]


def test_step_inputs_describe_each_row() -> None:
    held = pool()
    first, second = held.admit(), held.admit()
    held.reserve(first, 63)
    held.accept(first, 63)
    first.accepted = 1
    step = held.step_inputs([first, second], 2)
    assert step.slots.tolist() == [list(first.slots[:2]), list(second.slots[:2])]
    page, following = first.pages
    own = second.pages[0]
    assert step.slot_mapping.tolist() == [page * 64 + 63, following * 64, own * 64, own * 64 + 1]
    assert step.block_table.tolist() == [[page, following], [own, 0]]
    assert step.lengths.tolist() == [65, 2]
    assert step.accepted is None
    assert (step.context_min, step.context_max) == (2, 65)


def test_a_state_past_the_steps_rows_is_moved_home_with_its_window() -> None:
    held = pool()
    request = held.admit()
    state = held.caches[0].kda[0]
    for place, slot in enumerate(request.slots):
        state.recurrent[slot] = float(place)
    state.conv[request.slots[0], :, 0] = torch.arange(5, dtype=torch.bfloat16)
    held.reserve(request, 3)
    held.accept(request, 3)
    step = held.step_inputs([request], 1)
    assert step.accepted is None
    assert float(state.recurrent[request.slots[0]].mean()) == 2.0
    assert state.conv[request.slots[0], :3, 0].tolist() == [2.0, 3.0, 4.0]


def test_a_state_within_the_steps_rows_stays_where_it_is() -> None:
    held = pool()
    request = held.admit()
    held.reserve(request, 3)
    held.accept(request, 2)
    step = held.step_inputs([request], 3)
    assert step.accepted is not None
    assert step.accepted.tolist() == [2]


def test_a_resumed_prefix_shares_full_pages_and_copies_the_rest() -> None:
    held = pool(max_requests=3)
    request = held.admit()
    held.reserve(request, 70)
    held.accept(request, 70)
    request.accepted = 1
    cache = held.caches[0].mla[3]
    cache[request.pages[1], :6] = 7.0
    held.caches[0].kda[0].recurrent[request.slots[0]] = 3.0
    snapshot = held.snapshot(request)
    cache[request.pages[1], :6] = 9.0
    held.release(request)

    resumed = held.resume(snapshot)
    assert resumed.length == 70
    assert resumed.pages[0] == snapshot.full_pages[0]
    assert bool((cache[resumed.pages[1], :6] == 7.0).all())
    assert bool((held.caches[0].kda[0].recurrent[resumed.slots[0]] == 3.0).all())


def test_running_out_says_of_what() -> None:
    held = pool(max_requests=1)
    request = held.admit()
    with pytest.raises(OutOfRoom, match="no slot is free"):
        held.admit()
    with pytest.raises(OutOfRoom, match="would reach 133 tokens; the session holds 130"):
        held.reserve(request, 133)


class PoolMachine(RuleBasedStateMachine):
    """Any order of admissions, growth, prefixes and releases keeps ownership exclusive."""

    @initialize()
    def begin(self) -> None:
        self.pool = pool(max_requests=3, max_context=150, drafts=1)
        self.live: list[Request] = []
        self.kept: list[Snapshot] = []

    @precondition(lambda self: len(self.live) < 3)
    @rule()
    def admit(self) -> None:
        self.live.append(self.pool.admit())

    @precondition(lambda self: self.live)
    @rule(tokens=st.integers(1, 70), data=st.data())
    def grow(self, tokens: int, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        try:
            self.pool.reserve(request, tokens)
        except OutOfRoom:
            return
        request.length += tokens

    @precondition(lambda self: self.live and len(self.kept) < 2)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.kept.append(self.pool.snapshot(data.draw(st.sampled_from(self.live))))

    @precondition(lambda self: self.kept and len(self.live) < 3)
    @rule()
    def resume(self) -> None:
        try:
            self.live.append(self.pool.resume(self.kept[-1]))
        except OutOfRoom:
            assert not self.pool._free_pages

    @precondition(lambda self: self.kept)
    @rule()
    def forget(self) -> None:
        self.pool.forget(self.kept.pop())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.pool.release(request)

    @invariant()
    def slots_have_one_owner_and_pages_with_open_rows_too(self) -> None:
        slots = [slot for request in self.live for slot in request.slots]
        assert len(set(slots)) == len(slots)
        assert 0 not in slots
        open_pages = [page for request in self.live for page in request.pages[request.length // 64 :]]
        assert len(set(open_pages)) == len(open_pages)
        held = {page for request in self.live for page in request.pages}
        held |= {page for snapshot in self.kept for page in snapshot.full_pages}
        assert held.isdisjoint(self.pool._free_pages)
        assert 0 not in held | set(self.pool._free_pages)
        assert len(held) + len(self.pool._free_pages) == 3 * self.pool.max_pages


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
