"""What a model remembers: paged KV caches, KDA slots, and which request owns which of them.

Layouts are vLLM's. MLA layers have a cache [pages, 64, 576] (bf16, or fp8 e4m3 in units of `kv_scale`); KDA
layers a conv window bf16 [slots, 3 + drafts, 3P] and a recurrent state fp32 [slots, H, 128 (V), 128 (K)].
Page 0 and slot 0 are null: nobody owns them and nobody writes them. A request owns 1 + drafts slots; its
home, the first, holds the conv window, and the state after row t of a verify step is in slot t. All ranks
share the accounting and hold caches of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from k3_decode.ops.mla_query import PAGE_SIZE, cache_dtype
from k3_decode.shapes import RankShapes

__all__ = [
    "FP8_KV_SCALE",
    "KdaState",
    "OutOfRoom",
    "Pool",
    "RankCaches",
    "Request",
    "Snapshot",
    "StepInputs",
]

FP8_KV_SCALE = 0.05
"""Largest e4m3 value 448 then stands for 22.4, four times what a normed latent of 512 reaches in practice."""


class OutOfRoom(RuntimeError):
    """No slot or page is free; the message says which and how many there are."""


@dataclass(frozen=True, slots=True)
class KdaState:
    """One KDA layer's memory on one rank."""

    conv: torch.Tensor
    recurrent: torch.Tensor


class RankCaches:
    """Every layer's memory on one rank."""

    def __init__(self, kda: dict[int, KdaState], mla: dict[int, torch.Tensor], kv_scale: float = 1.0) -> None:
        self.kda, self.mla, self.kv_scale = kda, mla, kv_scale

    @classmethod
    def zeros(
        cls, shapes: RankShapes, slots: int, pages: int, drafts: int, kv_dtype: str, device: torch.device
    ) -> "RankCaches":
        """Empty caches of a whole model."""
        model = shapes.model
        kda: dict[int, KdaState] = {}
        mla: dict[int, torch.Tensor] = {}
        row = model.kv_lora + model.qk_rope
        for layer in range(model.layers):
            if model.is_mla(layer):
                shape = (pages, PAGE_SIZE, row)
                mla[layer] = torch.zeros(shape, dtype=cache_dtype(kv_dtype), device=device)
            else:
                window = model.conv_width - 1 + drafts
                conv = torch.zeros((slots, window, 3 * shapes.channels), dtype=torch.bfloat16, device=device)
                size = (slots, shapes.heads, model.head_dim, model.head_dim)
                kda[layer] = KdaState(conv, torch.zeros(size, dtype=torch.float32, device=device))
        return cls(kda, mla, FP8_KV_SCALE if kv_dtype == "fp8" else 1.0)

    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor by name: `layers.3.kv_cache`, `layers.0.conv_state`, `layers.0.recurrent_state`."""
        found = {f"layers.{layer}.kv_cache": cache for layer, cache in self.mla.items()}
        for layer, state in self.kda.items():
            found[f"layers.{layer}.conv_state"] = state.conv
            found[f"layers.{layer}.recurrent_state"] = state.recurrent
        return found


@dataclass(slots=True)
class Request:
    """A live request. `length` counts tokens whose KV rows are in the cache."""

    slots: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    length: int = 0
    accepted: int = 1
    """Rows of the last step that were kept: the state in force is in `slots[accepted - 1]`."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a decode or verify step needs besides its tokens, on the device; `rows` tokens a request."""

    requests: int
    rows: int
    slots: torch.Tensor
    """int32 [R, rows]."""
    accepted: torch.Tensor | None
    """int32 [R]; None where every request's state is in its home slot."""
    slot_mapping: torch.Tensor
    """int64 [R * rows]."""
    block_table: torch.Tensor
    """int32 [R, pages of the longest]."""
    lengths: torch.Tensor
    """int32 [R], this step's rows included."""
    context_min: int
    context_max: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A prefix to continue from: shared full pages, and copies of everything that later tokens change."""

    length: int
    full_pages: tuple[int, ...]
    tails: tuple[dict[int, torch.Tensor], ...]
    """For each rank, each MLA layer's rows past the last full page."""
    states: tuple[dict[int, KdaState], ...]


class Pool:
    """Slots and pages over all ranks' caches, given to requests and taken back.

    Invariant: a slot has at most one owner, and a page more than one only while all its rows are final.
    """

    def __init__(
        self,
        ranks: Sequence[RankShapes],
        *,
        max_requests: int,
        max_context: int,
        drafts: int,
        kv_dtype: str,
        device: torch.device,
        kept_prefixes: int = 0,
    ) -> None:
        self.drafts = drafts
        self.max_context = max_context
        self._device = device
        self._pages_per_request = -(-(max_context + drafts) // PAGE_SIZE)
        slots = 1 + max_requests * (1 + drafts)
        pages = 1 + (max_requests + kept_prefixes) * self._pages_per_request
        self.caches = tuple(RankCaches.zeros(rank, slots, pages, drafts, kv_dtype, device) for rank in ranks)
        self._free_slots = list(range(slots - 1, 0, -1))
        self._free_pages = list(range(pages - 1, 0, -1))
        self._owners = [0] * pages

    @property
    def max_pages(self) -> int:
        """Pages of a request of `max_context` tokens."""
        return self._pages_per_request

    def admit(self) -> Request:
        """A new request without tokens, its home slot cleared; raises `OutOfRoom`."""
        need = 1 + self.drafts
        if len(self._free_slots) < need:
            raise OutOfRoom("no slot is free: every one of the session's requests is live; finish one first")
        request = Request(tuple(self._free_slots.pop() for _ in range(need)))
        for caches in self.caches:
            for state in caches.kda.values():
                state.conv[request.slots[0]] = 0
                state.recurrent[request.slots[0]] = 0
        return request

    def release(self, request: Request) -> None:
        """Takes a request's slots and pages back."""
        self._free_slots.extend(reversed(request.slots))
        for page in request.pages:
            self._drop(page)
        request.pages.clear()

    def reserve(self, request: Request, tokens: int) -> None:
        """Gives a request pages for `tokens` more; raises `OutOfRoom` past the session's context."""
        total = request.length + tokens
        if total > self.max_context + self.drafts:
            raise OutOfRoom(f"a request would reach {total} tokens; the session holds {self.max_context}")
        while len(request.pages) * PAGE_SIZE < total:
            if not self._free_pages:
                raise OutOfRoom("no page is free; finish a request or drop a kept prefix first")
            page = self._free_pages.pop()
            self._owners[page] = 1
            request.pages.append(page)

    def slots_of_rows(self, request: Request, start: int, count: int) -> list[int]:
        """Cache slots (page * page size + offset) of the positions from `start` on."""
        positions = range(start, start + count)
        return [request.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]

    def step_inputs(
        self, requests: Sequence[Request], rows: int, *, is_fixed_shape: bool = False
    ) -> StepInputs:
        """Reserves pages and describes one step of `rows` rows for each of `requests`.

        Where a request's state lies past the step's rows it is moved home first. With `is_fixed_shape`
        nothing but the number of requests and rows decides a shape or what is None.
        """
        for request in requests:
            self.reserve(request, rows)
            if request.accepted > rows:
                self.settle(request)
        longest = max(len(request.pages) for request in requests)
        width = self._pages_per_request if is_fixed_shape else longest
        table = torch.zeros((len(requests), width), dtype=torch.int32)
        for i, request in enumerate(requests):
            table[i, : len(request.pages)] = torch.tensor(request.pages)
        mapping = [self.slots_of_rows(request, request.length, rows) for request in requests]
        lengths = [request.length + rows for request in requests]
        accepted = [request.accepted for request in requests]
        is_settled = rows == 1 or (not is_fixed_shape and max(accepted) == 1)
        return StepInputs(
            requests=len(requests),
            rows=rows,
            slots=self._int32([request.slots[:rows] for request in requests]),
            accepted=None if is_settled else self._int32(accepted),
            slot_mapping=torch.tensor(mapping, dtype=torch.int64).flatten().to(self._device),
            block_table=table.to(self._device),
            lengths=self._int32(lengths),
            context_min=min(lengths),
            context_max=max(lengths),
        )

    def _int32(self, values: Sequence[int] | Sequence[tuple[int, ...]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self._device)

    def accept(self, request: Request, count: int) -> None:
        """Keeps the first `count` rows of the step that just ran; the next one overwrites the rest."""
        request.length += count
        request.accepted = count

    def settle(self, request: Request) -> None:
        """Moves the state in force to the home slot and the conv window to its start."""
        shift = request.accepted - 1
        if shift == 0:
            return
        home, source = request.slots[0], request.slots[shift]
        for caches in self.caches:
            for state in caches.kda.values():
                state.recurrent[home] = state.recurrent[source]
                state.conv[home, :3] = state.conv[home, shift : shift + 3].clone()
        request.accepted = 1

    def snapshot(self, request: Request) -> Snapshot:
        """What continuing from here needs; its full pages stay until `forget`."""
        self.settle(request)
        count = request.length // PAGE_SIZE
        full, rest = request.pages[:count], request.length % PAGE_SIZE
        for page in full:
            self._owners[page] += 1
        tails: list[dict[int, torch.Tensor]] = []
        states: list[dict[int, KdaState]] = []
        for caches in self.caches:
            tail = {i: c[request.pages[count], :rest].clone() for i, c in caches.mla.items()} if rest else {}
            tails.append(tail)
            home = request.slots[0]
            states.append(
                {
                    i: KdaState(state.conv[home].clone(), state.recurrent[home].clone())
                    for i, state in caches.kda.items()
                }
            )
        return Snapshot(request.length, tuple(full), tuple(tails), tuple(states))

    def resume(self, snapshot: Snapshot) -> Request:
        """A new request that stands where the snapshot was taken."""
        request = self.admit()
        request.pages = list(snapshot.full_pages)
        for page in snapshot.full_pages:
            self._owners[page] += 1
        request.length = len(snapshot.full_pages) * PAGE_SIZE
        self.reserve(request, snapshot.length - request.length)
        rest = snapshot.length - request.length
        request.length = snapshot.length
        home = request.slots[0]
        for caches, tail, states in zip(self.caches, snapshot.tails, snapshot.states, strict=True):
            for layer, rows in tail.items():
                caches.mla[layer][request.pages[-1], :rest] = rows
            for layer, state in states.items():
                caches.kda[layer].conv[home] = state.conv
                caches.kda[layer].recurrent[home] = state.recurrent
        return request

    def forget(self, snapshot: Snapshot) -> None:
        """Gives up a snapshot's pages."""
        for page in snapshot.full_pages:
            self._drop(page)

    def _drop(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free_pages.append(page)
