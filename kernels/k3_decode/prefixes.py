"""Prompt prefixes kept for later requests: their state, and a share in their pages.

A prefix ends at a page boundary that a prefill chunk ended at. The least recently used one goes when there
are too many, or when the pool runs out of pages. Counters tell whether caching did anything.
"""

from collections import OrderedDict
from collections.abc import Sequence

from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.state import OutOfRoom, Pool, Request, Snapshot

__all__ = ["PrefixCache"]


class PrefixCache:
    """Snapshots by the tokens that led to them; holds at most `capacity`."""

    def __init__(self, pool: Pool, capacity: int) -> None:
        self._pool, self._capacity = pool, capacity
        self._kept: OrderedDict[tuple[int, ...], Snapshot] = OrderedDict()
        self.queries = 0
        """Prompts that asked."""
        self.hits = 0
        """Prompts that continued from a kept prefix."""
        self.reused_tokens = 0

    def resume(self, prompt: Sequence[int]) -> Request:
        """A request that holds the longest kept prefix of `prompt`, short of its last token; else an empty
        one.
        """
        if self._capacity == 0:
            return self._pool.admit()
        self.queries += 1
        lengths = sorted({len(key) for key in self._kept if len(key) < len(prompt)}, reverse=True)
        for length in lengths:
            key = tuple(prompt[:length])
            if key in self._kept:
                self._kept.move_to_end(key)
                self.hits += 1
                self.reused_tokens += length
                return self._pool.resume(self._kept[key])
        return self._pool.admit()

    def keep(self, prompt: Sequence[int], request: Request) -> None:
        """Keeps what the request holds of `prompt`, if that ends at a page boundary."""
        key = tuple(prompt[: request.length])
        if self._capacity == 0 or request.length % PAGE_SIZE or key in self._kept:
            return
        self._kept[key] = self._pool.snapshot(request)
        while len(self._kept) > self._capacity:
            self._drop_oldest()

    def reserve(self, request: Request, tokens: int) -> None:
        """Pages for more tokens of a request; drops kept prefixes if need be. Raises `OutOfRoom`."""
        while True:
            try:
                return self._pool.reserve(request, tokens)
            except OutOfRoom:
                if not self._kept:
                    raise
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _key, snapshot = self._kept.popitem(last=False)
        self._pool.forget(snapshot)
