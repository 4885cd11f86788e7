"""A step's tokens by expert, as lists in the shared memory of each block of the expert kernel.

Words: a *pair* is token x top_k + place. `used` ranks count the experts in use, in ascending order of their
ids (for one token in the order of its ids); an *item* is an expert and up to 4 of its tokens. Invariant:
all blocks of a grid build the same lists, so that an item means the same tokens everywhere: where an expert
has more than 4 tokens, its pairs are in ascending order.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute import ring

__all__ = [
    "COLUMNS",
    "Lists",
    "build",
    "clear",
    "expert_of",
    "item_tokens",
    "list_choice",
    "pair_at",
    "rank_tokens",
    "share_at",
    "token_of",
]

COLUMNS = 4
"""Tokens of one expert that a matrix instruction takes at once: one in two of its columns."""
COUNT_BITS = 11
"""Pairs and items of a step fit into 11 bits each, experts in use into 10: one scan adds all three."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Sizes, and byte offsets of the lists from their start; an entry has 4 bytes."""

    experts: int
    top_k: int
    capacity: int
    threads: int

    @property
    def pairs(self) -> int:
        """Most pairs of a step."""
        return self.capacity * self.top_k

    @property
    def used(self) -> int:
        """Most experts in use."""
        return min(self.experts, self.pairs)

    @property
    def starts(self) -> int:
        """By rank: the first place of the expert's pairs; the experts themselves (id, count << 16) come
        before.
        """
        return 4 * self.used

    @property
    def items(self) -> int:
        """By item: rank, block of 4 tokens << 16."""
        return self.starts + 4 * self.used

    @property
    def sorted(self) -> int:
        """Pairs, expert by expert."""
        return self.items + 4 * self.pairs

    @property
    def shares(self) -> int:
        """The router's weight of each sorted pair."""
        return self.sorted + 4 * self.pairs

    @property
    def counts(self) -> int:
        """By expert: pairs so far, then first place and count << 16."""
        return self.shares + 4 * self.pairs

    @property
    def sums(self) -> int:
        """A word a warp."""
        return self.counts + 4 * self.experts

    @property
    def size(self) -> int:
        return self.sums + 4 * 32


@cute.jit
def clear(at: Int32, tid: Int32, lists: cutlass.Constexpr):
    """All threads: no pairs yet; a block barrier must follow."""
    for e in cutlass.range_constexpr((lists.experts + lists.threads - 1) // lists.threads):
        if tid + e * lists.threads < lists.experts:
            ring.store_shared(at + lists.counts + (tid + e * lists.threads) * 4, Int32(0))


@cute.jit
def build(ids: cute.Tensor, weights: cute.Tensor, at: Int32, tid: Int32, lists: cutlass.Constexpr):
    """All threads: fill the lists; returns the number of items and of experts in use."""
    items, used = Int32(0), Int32(0)
    if ids.shape[0] == 1:
        used = _list_one_token(ids, weights, at, tid, lists)
        items = used
    else:
        items, used = _group_tokens(ids, weights, at, tid, lists)
    return items, used


def expert_of(at: Int32, rank: Int32) -> Int32:
    """Id of the expert of a rank."""
    return ring.load_shared(at + rank * 4) & 0xFFFF


def rank_tokens(at: Int32, rank: Int32, lists: Lists) -> tuple[Int32, Int32]:
    """First place of a rank's pairs, and their number."""
    return ring.load_shared(at + lists.starts + rank * 4), ring.load_shared(at + rank * 4) >> 16


def item_tokens(at: Int32, item: Int32, lists: Lists) -> tuple[Int32, Int32]:
    """First place of an item's pairs, and their number, at most 8."""
    packed = ring.load_shared(at + lists.items + item * 4)
    start, count = rank_tokens(at, packed & 0xFFFF, lists)
    first = (packed >> 16) * COLUMNS
    return start + first, cutlass.min(count - first, COLUMNS)


def pair_at(at: Int32, place: Int32, lists: Lists) -> Int32:
    """The pair at a place of the sorted list."""
    return ring.load_shared(at + lists.sorted + place * 4)


def token_of(pair: Int32, lists: Lists) -> Int32:
    """The token of a pair."""
    if lists.top_k.bit_count() == 1:
        return pair >> (lists.top_k.bit_length() - 1)
    return pair // lists.top_k


def share_at(at: Int32, place: Int32, lists: Lists) -> Float32:
    """The router's weight of that pair."""
    return ins.shared_load_f32(at + lists.shares + place * 4)


@cute.jit
def _list_one_token(ids: cute.Tensor, weights: cute.Tensor, at: Int32, tid: Int32, lists: cutlass.Constexpr):
    """One token's experts as the router left them."""
    if tid < 32:
        expert, part = Int32(-1), Float32(0.0)
        if tid < lists.top_k:
            expert = ins.load_activation_word(ins.byte_address(ids) + Int64(tid) * 4)
            part = _load_share(ins.byte_address(weights) + Int64(tid) * 4)
        list_choice(expert, part, at, tid, lists)
    cute.arch.sync_threads()
    return ring.load_shared(at + lists.sums)


@cute.jit
def list_choice(expert: Int32, share: Float32, at: Int32, lane: Int32, lists: cutlass.Constexpr):
    """One warp: fill the lists for one token, whose experts are distinct: ranks, items and places in the
    order of the lanes; a block barrier must follow. `sums` then holds the number of experts in use.
    """
    is_used = lane < lists.top_k and expert >= 0 and expert < lists.experts
    mask = cute.arch.vote_ballot_sync(is_used)
    if is_used:
        rank = cute.arch.popc(mask & ((1 << lane) - 1))
        ring.store_shared(at + rank * 4, expert | (1 << 16))
        ring.store_shared(at + lists.starts + rank * 4, lane)
        ring.store_shared(at + lists.items + rank * 4, rank)
        ring.store_shared(at + lists.sorted + lane * 4, lane)
        ins.shared_store_f32(at + lists.shares + lane * 4, share)
    if lane == 0:
        ring.store_shared(at + lists.sums, cute.arch.popc(mask))


@cute.jit
def _group_tokens(ids: cute.Tensor, weights: cute.Tensor, at: Int32, tid: Int32, lists: cutlass.Constexpr):
    """Count the pairs of each expert, scan the counts over the experts, scatter the pairs."""
    counts_at, threads = at + lists.counts, lists.threads
    pairs = ids.shape[0] * lists.top_k
    chosen, places, parts = [], [], []
    for i in cutlass.range_constexpr((lists.pairs + threads - 1) // threads):
        pair = tid + i * threads
        expert, place, part = Int32(-1), Int32(0), Float32(0.0)
        if pair < pairs:
            expert = ins.load_activation_word(ins.byte_address(ids) + Int64(pair) * 4)
            part = _load_share(ins.byte_address(weights) + Int64(pair) * 4)
            if expert >= lists.experts:
                expert = Int32(-1)
            if expert >= 0:
                place = ins.asm("atom.shared.add.s32 $0, [$1], 1;", "=r,r", [counts_at + expert * 4], [Int32])
        chosen.append(expert)
        places.append(place)
        parts.append(part)
    cute.arch.sync_threads()
    items, used = _scan_experts(at, tid, lists)
    for i in cutlass.range_constexpr(len(chosen)):
        if chosen[i] >= 0:
            to = (ring.load_shared(counts_at + chosen[i] * 4) & 0xFFFF) + places[i]
            _store_pair(at, to, tid + i * threads, parts[i], lists)
    cute.arch.sync_threads()
    if items > used:
        # An expert has more than one item; the atomics' order differs from block to block.
        ranked = []
        for i in cutlass.range_constexpr(len(chosen)):
            to = Int32(0)
            if chosen[i] >= 0:
                entry = ring.load_shared(counts_at + chosen[i] * 4)
                to = entry & 0xFFFF
                for other in cutlass.range(entry >> 16, unroll=1):
                    if pair_at(at, (entry & 0xFFFF) + other, lists) < tid + i * threads:
                        to = to + 1
            ranked.append(to)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(len(chosen)):
            if chosen[i] >= 0:
                _store_pair(at, ranked[i], tid + i * threads, parts[i], lists)
        cute.arch.sync_threads()
    return items, used


@cute.jit
def _scan_experts(at: Int32, tid: Int32, lists: cutlass.Constexpr):
    """From the counts by expert: ranks, first places and items; ends with a block barrier."""
    lane, warp = tid % 32, tid // 32
    each, counts_at = (lists.experts + lists.threads - 1) // lists.threads, at + lists.counts
    own, packed = [], Int32(0)
    for j in cutlass.range_constexpr(each):
        count = Int32(0)
        if tid * each + j < lists.experts:
            count = ring.load_shared(counts_at + (tid * each + j) * 4)
        own.append(count)
        packed = packed + count + (_blocks_of(count) << COUNT_BITS)
        packed = packed + (cutlass.min(count, 1) << (2 * COUNT_BITS))
    scanned = packed
    for step in cutlass.range_constexpr(5):
        scanned = ring.add_from_below(scanned, 1 << step)
    if lane == 31:
        ring.store_shared(at + lists.sums + warp * 4, scanned)
    cute.arch.sync_threads()
    whole, below = Int32(0), Int32(0)
    if lane < lists.threads // 32:
        whole = ring.load_shared(at + lists.sums + lane * 4)
    if lane < warp:
        below = whole
    before = ring.warp_add(below) + scanned - packed
    whole = ring.warp_add(whole)
    place, item, rank = _unpacked(before)
    for j in cutlass.range_constexpr(each):
        count = own[j]
        if count > 0:
            ring.store_shared(at + rank * 4, (tid * each + j) | (count << 16))
            ring.store_shared(at + lists.starts + rank * 4, place)
            ring.store_shared(counts_at + (tid * each + j) * 4, place | (count << 16))
            for b in cutlass.range(_blocks_of(count), unroll=1):
                ring.store_shared(at + lists.items + (item + b) * 4, rank | (b << 16))
            place, item, rank = place + count, item + _blocks_of(count), rank + 1
    cute.arch.sync_threads()
    _, items, used = _unpacked(whole)
    return items, used


def _blocks_of(count: Int32) -> Int32:
    """Items of an expert."""
    return (count + (COLUMNS - 1)) >> 2


def _unpacked(packed: Int32) -> tuple[Int32, Int32, Int32]:
    """Pairs, items and experts of a packed sum."""
    low = (1 << COUNT_BITS) - 1
    return packed & low, (packed >> COUNT_BITS) & low, (packed >> (2 * COUNT_BITS)) & 0x3FF


def _store_pair(at: Int32, place: Int32, pair: Int32, share: Float32, lists: Lists) -> None:
    ring.store_shared(at + lists.sorted + place * 4, pair)
    ins.shared_store_f32(at + lists.shares + place * 4, share)


def _load_share(address: Int64) -> Any:
    """A router weight."""
    return ins.asm("ld.global.f32 $0, [$1];", "=f,l", [address], [Float32])
