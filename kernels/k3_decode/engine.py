"""A model served step by step in this process: requests in, log-probabilities out, either path under the
guard.

Prefill always runs stock. Every step is put to the dispatcher first, which tells the observer; the step then
runs on every rank in lock step. Log-probabilities are fp32. Stock and optimised path share weights and
caches, so the switch may turn between any two steps.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial

import torch

from k3_decode.bound_layers import Layout
from k3_decode.collectives.strategies import Strategy, in_process
from k3_decode.decode import OptimisedStep, is_supported
from k3_decode.dispatch import Decision, Dispatcher, Guard, Phase, Site, StepFacts
from k3_decode.graphs import GraphedSteps
from k3_decode.model import PrefillChunk, StockModel
from k3_decode.op_table import load_ops, poisoned
from k3_decode.ops.contract import OP_NAMES
from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.prefixes import PrefixCache
from k3_decode.rank_weights import ModelWeights
from k3_decode.state import OutOfRoom, Pool, Request, Snapshot
from k3_decode.tuning import tuned_words

__all__ = ["Engine", "EngineOptions"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is served."""

    max_requests: int
    max_context: int
    drafts: int = 0
    """Draft rows that a verify step may hold beside the request's own."""
    kv_dtype: str = "bf16"
    implementation: str = "cpu"
    """Of the fused ops: `cpu`, `cute`, or `stock`."""
    arch: str = "cpu"
    """What the guard takes the device for, such as `sm_90a`."""
    is_on: bool = False
    """Whether the optimised path is selected from the start."""
    is_graph: bool = False
    """Whether optimised steps are captured once for each shape and replayed."""
    layout: Layout = "whole"
    """Of router and latent projections over the ranks (`layers.py`)."""
    prefill_chunk: int = 2048
    kept_prefixes: int = 0
    """Prompt prefixes to keep for later requests; 0: no prefix caching."""
    poisoned_op: str | None = None
    poison_scale: float = 1.05


class Engine:
    """One model with its caches, over all of its ranks that live in this process.

    Owns the caches and, on a CPU, this process's thread count, until `close`.
    """

    def __init__(
        self,
        ranks: Sequence[ModelWeights],
        guard: Guard,
        options: EngineOptions,
        observer: Callable[[Decision], None] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        shapes = ranks[0].shapes
        self._strategy = strategy or in_process(len(ranks))
        _require_met(self._strategy, len(ranks), shapes.tp)
        device = ranks[0].embedding.device
        if options.is_graph and device.type == "cpu":
            raise ValueError("is_graph needs a GPU: a CPU has no graphs to capture a step in")
        self._ranks, self._device = tuple(ranks), device
        self._options = options
        self._threads = torch.get_num_threads()
        if device.type == "cpu":
            # Small steps are bound by calls, not by arithmetic: on a loaded machine of 2 cores two threads
            # took 10 to 80 times as long as one (measured on a prefill of 8192 tokens).
            torch.set_num_threads(1)
        self._pool = Pool(
            [rank.shapes for rank in ranks],
            max_requests=options.max_requests,
            max_context=options.max_context,
            drafts=options.drafts,
            kv_dtype=options.kv_dtype,
            kept_prefixes=options.kept_prefixes,
            device=device,
        )
        self._prefixes = PrefixCache(self._pool, options.kept_prefixes)
        pairs = list(zip(ranks, self._pool.caches, strict=True))
        self._stock = tuple(StockModel(rank, caches) for rank, caches in pairs)
        self._optimised: tuple[OptimisedStep, ...] = ()
        self._router_rows = 1
        if is_supported(shapes.model):
            table = load_ops(options.implementation, shapes, device)
            if options.poisoned_op is not None:
                table = poisoned(table, options.poisoned_op, options.poison_scale)
            self._router_rows = table["router"].from_rows
            rows = min(options.max_requests * (1 + options.drafts), guard.envelope.max_rows_per_step)
            self._optimised = tuple(
                OptimisedStep(rank, caches, table, rows, options.layout, self._strategy.group)
                for rank, caches in pairs
            )
        self._graphs = None
        if options.is_graph:
            self._graphs = GraphedSteps(self._optimised, self._pool.max_pages, self._strategy.drive)
        site = Site(
            arch=options.arch,
            tp=shapes.tp,
            dcp=1,
            kv_dtype=options.kv_dtype,
            layers=shapes.model.layers,
            is_supported_model=bool(self._optimised),
            collective=self._strategy.name,
        )
        tuned = partial(tuned_words, options.implementation, shapes)
        self._dispatcher = Dispatcher(guard, site, observer, tuned)
        self._dispatcher.is_on = options.is_on
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._steps = 0
        self._last_run = (False, 0)
        """Path and rows of the last step."""

    @property
    def vocab_size(self) -> int:
        """Tokens that logits cover: those of all ranks that meet."""
        here = sum(rank.head.shape[0] for rank in self._ranks)
        met = 1 if self._strategy.name == "none" else self._ranks[0].shapes.tp // len(self._ranks)
        return here * met

    @property
    def prefixes(self) -> PrefixCache:
        """Kept prefixes and their counters."""
        return self._prefixes

    def switch(self, is_on: bool) -> None:
        """Selects the optimised path, or stock, from the next step on."""
        self._dispatcher.is_on = is_on

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """Takes requests in; their ids, and log-probabilities [R, vocab] after each last prompt token.

        A prompt that comes several times is computed once; the others go on from there. Raises `OutOfRoom`,
        and takes none of them in, where slots or pages do not suffice.
        """
        if not prompts or not all(prompts):
            raise ValueError("prefill needs at least one prompt, and each prompt at least one token")
        counts = Counter(map(tuple, prompts))
        repeated: dict[tuple[int, ...], tuple[Snapshot, torch.Tensor]] = {}
        ids, logits = [], []
        try:
            for prompt in map(tuple, prompts):
                if prompt in repeated:
                    snapshot, last = repeated[prompt]
                    ids.append(self._enter(self._pool.resume(snapshot)))
                else:
                    request = self._prefixes.resume(prompt)
                    ids.append(self._enter(request))
                    last = self._extend(request, prompt[request.length :], prompt)[-1:]
                    if counts[prompt] > 1:
                        repeated[prompt] = (self._pool.snapshot(request), last)
                logits.append(last)
        except OutOfRoom:
            self.finish(ids)
            raise
        finally:
            for snapshot, _last in repeated.values():
                self._pool.forget(snapshot)
        return ids, torch.log_softmax(torch.cat(logits), dim=-1)

    @torch.no_grad()
    def extend(self, request: int, tokens: Sequence[int]) -> torch.Tensor:
        """Prefills more tokens of a live request; log-probabilities [T, vocab] after each of them."""
        return torch.log_softmax(self._extend(self._requests[request], tokens, None), dim=-1)

    @torch.no_grad()
    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Appends one token to each request; log-probabilities [R, vocab] of the next one."""
        return self._step("decode", requests, [[token] for token in tokens], [1] * len(requests))

    @torch.no_grad()
    def verify(
        self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> torch.Tensor:
        """Appends `rows[i]` to request i, keeps the first `accepted[i]`; log-probabilities of every row."""
        for drafted, kept in zip(rows, accepted, strict=True):
            if not 1 <= kept <= len(drafted) <= 1 + self._options.drafts:
                raise ValueError(
                    f"{len(drafted)} rows of which {kept} are kept: the session takes 1 to "
                    f"{1 + self._options.drafts} rows a request and keeps at least the first"
                )
        return self._step("verify", requests, rows, accepted)

    def finish(self, requests: Sequence[int]) -> None:
        """Frees the slots and pages of requests."""
        for request in requests:
            self._pool.release(self._requests.pop(request))

    def lengths(self, requests: Sequence[int]) -> list[int]:
        """Tokens that each request holds."""
        return [self._requests[request].length for request in requests]

    def launches(self) -> dict[str, int]:
        """Kernel launches of optimised ops, counted by the kernels, over all ranks since the engine began."""
        totals = [0] * len(OP_NAMES)
        for step in self._optimised:
            totals = [a + b for a, b in zip(totals, step.launches.tolist(), strict=False)]
        return {op: count for op, count in zip(OP_NAMES, totals, strict=True) if count}

    def expert_choices(self) -> tuple[int, list[list[int]]]:
        """How many experts a layer has, and those of each row of the last step in its last MoE layer.

        No rows where no router was launched: one row's choice may be made inside the experts' kernel.
        """
        model = self._ranks[0].shapes.model
        is_optimised, rows = self._last_run
        found = self._optimised[0].buffers.get("ids") if is_optimised else self._stock[0].choice
        if found is None or (is_optimised and rows < self._router_rows):
            return model.experts, []
        return model.experts, found[:rows].tolist()

    def watched(self) -> dict[str, torch.Tensor]:
        """Every tensor reachable from the engine, by name."""
        found: dict[str, torch.Tensor] = {}
        for i, (weights, caches) in enumerate(zip(self._ranks, self._pool.caches, strict=True)):
            found |= tensors_in(weights, f"rank{i}.weights")
            found |= {f"rank{i}.{name}": tensor for name, tensor in caches.named().items()}
            found |= tensors_in(self._stock[i].constants(), f"rank{i}.stock")
        for i, step in enumerate(self._optimised):
            found |= tensors_in(step.constants(), f"rank{i}.prepared")
            found |= {f"rank{i}.step_buffers.{name}": buffer for name, buffer in step.buffers.items()}
            found[f"rank{i}.step_buffers.launches"] = step.launches
        return found

    def writable(self, requests: Sequence[int]) -> dict[str, torch.Tensor]:
        """Masks over `watched` of what the next decode or verify step of `requests` may write."""
        masks: dict[str, torch.Tensor] = {}
        live = [self._requests[request] for request in requests]
        for request in live:
            self._pool.reserve(request, 1 + self._options.drafts)
        for i, caches in enumerate(self._pool.caches):
            for name, tensor in caches.named().items():
                masks[f"rank{i}.{name}"] = self._state_mask(name, tensor, live)
        for name, tensor in self.watched().items():
            if ".step_buffers." in name or "workspace" in name:
                masks[name] = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
        return masks

    def require_sound(self) -> None:
        """Raises `ExchangeError` where a peer was not heard in time."""
        self._strategy.require_sound()

    def close(self) -> None:
        """Gives the caches and the thread count back; the strategy stays its owner's."""
        self._requests.clear()
        self._stock, self._optimised, self._graphs = (), (), None
        torch.set_num_threads(self._threads)

    def _enter(self, request: Request) -> int:
        """The number by which a new request is known."""
        number = self._next_id
        self._requests[number] = request
        self._next_id += 1
        return number

    def _extend(self, request: Request, tokens: Sequence[int], prompt: Sequence[int] | None) -> torch.Tensor:
        """Logits of a request's further prompt tokens: of the last one of a prompt, else of each."""
        self._pool.settle(request)
        logits: list[torch.Tensor] = []
        for count in self._chunks(request.length, len(tokens), is_kept=prompt is not None):
            start = request.length
            self._prefixes.reserve(request, count)
            part = torch.tensor(tokens[:count], device=self._device)
            tokens = tokens[count:]
            slots = torch.tensor(self._pool.slots_of_rows(request, start, count), device=self._device)
            chunk = PrefillChunk(
                home=request.slots[0],
                start=start,
                slot_mapping=slots,
                pages=torch.tensor(request.pages, device=self._device),
                wants_all_rows=prompt is None,
            )
            self._decide("prefill", (count,), start + count, start + count)
            logits.append(self._strategy.drive([stock.forward(part, chunk) for stock in self._stock])[0])
            self._pool.accept(request, count)
            request.accepted = 1
            if prompt is not None:
                self._prefixes.keep(prompt, request)
        return torch.cat(logits)

    def _chunks(self, start: int, count: int, *, is_kept: bool) -> list[int]:
        """Sizes of the chunks of `count` tokens; with prefix caching the last full page ends one."""
        stops = list(range(start + self._options.prefill_chunk, start + count, self._options.prefill_chunk))
        last_page = (start + count - 1) // PAGE_SIZE * PAGE_SIZE
        if is_kept and self._options.kept_prefixes and last_page > start:
            stops = sorted({*stops, last_page})
        ends = [*stops, start + count]
        return [end - begin for begin, end in zip([start, *stops], ends, strict=True)]

    def _step(
        self, phase: Phase, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> torch.Tensor:
        live = [self._requests[request] for request in requests]
        sizes = tuple(len(drafted) for drafted in rows)
        after = [request.length + size for request, size in zip(live, sizes, strict=True)]
        decision = self._decide(phase, sizes, min(after), max(after))
        if decision.path == "optimised":
            logits = self._run(live, rows, is_optimised=True)
        else:
            logits = self._run_uneven(live, rows)
        for request, kept in zip(live, accepted, strict=True):
            self._pool.accept(request, kept)
        return torch.log_softmax(logits, dim=-1)

    def _run_uneven(self, live: Sequence[Request], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Stock logits in request order, one pass for each number of rows."""
        parts: dict[int, torch.Tensor] = {}
        for size in sorted({len(drafted) for drafted in rows}):
            members = [i for i, drafted in enumerate(rows) if len(drafted) == size]
            logits = self._run([live[i] for i in members], [rows[i] for i in members], is_optimised=False)
            parts |= {i: logits[n * size : (n + 1) * size] for n, i in enumerate(members)}
        return torch.cat([parts[i] for i in range(len(rows))])

    def _run(
        self, live: Sequence[Request], rows: Sequence[Sequence[int]], *, is_optimised: bool
    ) -> torch.Tensor:
        size = len(rows[0])
        self._last_run = (is_optimised, size * len(rows))
        for request in live:
            self._prefixes.reserve(request, size)
        flat = [token for drafted in rows for token in drafted]
        if is_optimised and self._graphs is not None:
            inputs = self._pool.step_inputs(live, size, is_fixed_shape=True)
            return self._graphs.run(torch.tensor(flat, device=self._device), inputs)
        tokens = torch.tensor(flat, device=self._device)
        inputs = self._pool.step_inputs(live, size)
        forwards = [
            model.forward(tokens, inputs) for model in (self._optimised if is_optimised else self._stock)
        ]
        return self._strategy.drive(forwards)[0]

    def _decide(self, phase: Phase, rows: tuple[int, ...], shortest: int, longest: int) -> Decision:
        is_graph = self._graphs is not None and phase in ("decode", "verify")
        facts = StepFacts(self._steps, phase, rows, is_graph, shortest, longest)
        self._steps += 1
        return self._dispatcher.decide(facts)

    def _state_mask(self, name: str, tensor: torch.Tensor, live: Sequence[Request]) -> torch.Tensor:
        mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        for request in live:
            if name.endswith("kv_cache"):
                for slot in self._pool.slots_of_rows(request, request.length, 1 + self._options.drafts):
                    mask[slot // PAGE_SIZE, slot % PAGE_SIZE] = True
            elif name.endswith("conv_state"):
                mask[request.slots[0]] = True
            else:
                mask[list(request.slots)] = True
        return mask


def _require_met(strategy: Strategy, here: int, ranks: int) -> None:
    """Raises `ValueError` where the ranks of this process are not those that the strategy brings together.
    One rank alone may be driven without its peers, as a slice that meets nobody and says so.
    """
    if strategy.name == "none" and here == 1:
        return
    is_across = strategy.name in ("processes", "exchange")
    if here != (1 if is_across else ranks):
        raise ValueError(
            f"{here} of {ranks} ranks live in this process, which {strategy.name!r} does not bring together; "
            f"give {'one' if is_across else 'all of them'}"
        )


def tensors_in(value: object, name: str) -> dict[str, torch.Tensor]:
    """Every tensor inside records, mappings and sequences, named by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    parts: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, tuple | list):
        parts = list(enumerate(value))
    elif is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    found: dict[str, torch.Tensor] = {}
    for key, part in parts:
        found |= tensors_in(part, f"{name}.{key}")
    return found
