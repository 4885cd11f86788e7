"""A pack with two ops and a model of eight numbers a request, real enough for every stage to judge.

`mix`: state = 0.9 state + embedding[token]; `head`: logits = state @ weight. The optimised path computes the
same in another order of operations. `Faults` plants one fault at a time.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.pack import (
    Arm,
    Decision,
    EvalItem,
    EvalTask,
    KernelManifest,
    KernelUse,
    KernelVariant,
    LayerRequest,
    LayerSlice,
    OpContract,
    OpParameter,
    Session,
    SessionRequest,
)

VOCAB, WIDTH, SLOTS, PAGE = 32, 8, 80, 64
AROUND = (
    "aten::cos",
    "aten::mul",
    "aten::mul_",
    "aten::add",
    "aten::log_softmax",
    "aten::stack",
    "aten::index*",
)
"""What the fake's step does around its two ops."""
STOP = 1


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the pack; nothing by default."""

    fallback_from_step: int | None = None
    """The dispatcher silently takes stock from this step on, and says so in the ledger."""
    lying_ledger: bool = False
    """The ledger says `optimised` where stock ran."""
    takes_everything: bool = False
    """The guard ignores the envelope."""
    writes_neighbour: bool = False
    """An optimised step changes another request's slot."""
    leaves_flag: bool = False
    """An optimised step changes a global torch flag and leaves it so."""
    deaf_op: str | None = None
    """Poisoning this op changes nothing."""
    error: float = 0.0
    """Relative error of the optimised head."""
    growing_error: float = 0.0
    """Relative error of the optimised head for each token already seen."""
    nan_from_step: int | None = None
    stale_after_switch: bool = False
    """Switching to stock forgets the last optimised step."""
    spin: int = 0
    """Extra work of an optimised step."""
    extra_kernel: bool = False
    """An optimised step runs a product that its manifest does not declare."""
    counts_without_running: bool = False
    """The counters and the ledger say that the path ran; stock did."""
    loses_kept_row: bool = False
    """A verify step keeps a row fewer than it was told."""
    forgets_prefix_state: bool = False
    """A prefix hit starts from an empty state."""
    never_hits: bool = False
    """The prefix cache is asked and never hits."""
    dirty_slot: bool = False
    """A new request starts from what its slot's former owner left."""
    takes_uneven: bool = False
    """Requests with unlike numbers of rows take the fast path."""
    collective: str = ""
    """How the optimised arm's ranks meet, where it is another way than stock's."""
    takes_hook: bool = False
    """An optimised step replaces the interpreter's call hook."""
    leaves_variable: bool = False
    """An optimised step sets an environment variable."""
    leaves_state: bool = False
    """What the path wrote stays in the slots after the switch is turned off."""
    said_ranks: int = 1
    """What the ledger says of how many ranks ran a step; one does."""
    rounds_every_rank: bool = False
    """A sum over ranks is rounded to bf16 after each."""


class FakeSession:
    """See `domain.pack.Session`."""

    def __init__(
        self, request: SessionRequest, faults: Faults, observer: Callable[[Decision], None] | None, limit: int
    ) -> None:
        source = torch.Generator().manual_seed(request.seed + 1)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=source, dtype=torch.float64)
        self.weight = torch.randn(WIDTH, VOCAB, generator=source, dtype=torch.float64)
        self.state = torch.zeros(SLOTS, WIDTH, dtype=torch.float64)
        self._request, self._faults, self._observer, self._limit = request, faults, observer, limit
        self._arm: Arm = request.arm
        self._next, self._step = 1, 0
        self._lengths: dict[int, int] = {}
        self._free: list[int] = []
        self._prefixes: dict[tuple[int, ...], torch.Tensor] = {}
        self._counters = [0, 0, 0]
        self._launches = {"mix": 0, "head": 0}

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        ids = [self._slot() for _ in prompts]
        self._decide("prefill", ids, max(map(len, prompts)), len(prompts) * len(prompts[0]), None)
        for slot, prompt in zip(ids, prompts, strict=True):
            done = self._resume(slot, tuple(prompt))
            for place in range(done, len(prompt)):
                self.state[slot] = 0.9 * self.state[slot] + self.embedding[prompt[place]]
                if self._request.kept_prefixes and (place + 1) % PAGE == 0:
                    self._prefixes[tuple(prompt[: place + 1])] = self.state[slot].clone()
            self._lengths[slot] = len(prompt)
        return ids, self._stock_head(ids)

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def _resume(self, slot: int, prompt: tuple[int, ...]) -> int:
        """Clears a slot, or puts a kept prefix into it; tokens that need not be computed."""
        if not self._faults.dirty_slot:
            self.state[slot] = 0
        if not self._request.kept_prefixes:
            return 0
        self._counters[0] += 1
        kept = [key for key in self._prefixes if len(key) < len(prompt) and prompt[: len(key)] == key]
        if not kept or self._faults.never_hits:
            return 0
        self._counters[1] += 1
        self._counters[2] += len(kept[0])
        if not self._faults.forgets_prefix_state:
            self.state[slot] = self._prefixes[kept[0]]
        return len(kept[0])

    def prefix_counters(self) -> tuple[int, int, int]:
        asked, hits, reused = self._counters
        return asked, hits, reused

    def expert_choices(self) -> tuple[int, list[list[int]]]:
        return 0, []

    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        return self._rows("decode", requests, [[t] for t in tokens])

    def verify(
        self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> torch.Tensor:
        before = {slot: self.state[slot].clone() for slot in requests}
        out = self._rows("verify", requests, rows)
        for slot, drafted, kept in zip(requests, rows, accepted, strict=True):
            self.state[slot] = before[slot]
            for token in drafted[: max(1, kept - self._faults.loses_kept_row)]:
                self.state[slot] = 0.9 * self.state[slot] + self.embedding[token]
        return out

    def finish(self, requests: Sequence[int]) -> None:
        for slot in requests:
            self._lengths.pop(slot, None)
            self._free.append(slot)

    def launches(self) -> Mapping[str, int]:
        return dict(self._launches)

    def watched(self) -> Mapping[str, torch.Tensor]:
        return {"embedding": self.embedding, "weight": self.weight, "state": self.state}

    def writable(self, requests: Sequence[int]) -> Mapping[str, torch.Tensor]:
        mask = torch.zeros_like(self.state, dtype=torch.bool)
        mask[list(requests)] = True
        return {"state": mask}

    def switch(self, arm: Arm) -> None:
        if self._faults.stale_after_switch and arm != self._arm:
            self.state *= 0.9
        self._arm = arm

    def close(self) -> None:
        self._lengths.clear()

    def _rows(self, phase: str, requests: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        count = max(map(len, rows))
        is_even = len({len(row) for row in rows}) == 1 or self._faults.takes_uneven
        inside = is_even and len(requests) <= 64 and len(requests) * count <= self._limit
        taken = self._arm == "optimised" and (inside or self._faults.takes_everything)
        late = self._faults.fallback_from_step
        really = taken and (late is None or self._step < late)
        said = taken if self._faults.lying_ledger else really
        reason = (
            "taken" if said else "switch_off" if self._arm == "stock" else "rows" if not inside else "silent"
        )
        self._decide(phase, requests, count, len(requests) * count, said, reason)
        if self._faults.counts_without_running:
            really = False
        out: list[list[torch.Tensor]] = [[] for _ in rows]
        for position in range(count):
            here = [i for i, row in enumerate(rows) if position < len(row)]
            slots, tokens = [requests[i] for i in here], [rows[i][position] for i in here]
            found = self._optimised(slots, tokens) if really else self._stock(slots, tokens)
            for i, row in zip(here, found, strict=True):
                out[i].append(row)
        if really or (taken and self._faults.counts_without_running):
            self._launches["mix"] += count
            self._launches["head"] += count
        self._step += 1
        return torch.stack([row for part in out for row in part])

    def _stock(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        for slot, token in zip(requests, tokens, strict=True):
            self.state[slot] = 0.9 * self.state[slot] + self.embedding[token]
            self._lengths[slot] += 1
        return self._stock_head(requests)

    def _stock_head(self, requests: Sequence[int]) -> torch.Tensor:
        dtype = torch.float64 if self._request.is_oracle else torch.float32
        logits = self.state[list(requests)].to(dtype) @ self.weight.to(dtype)
        return torch.log_softmax(logits, -1)

    def _optimised(self, requests: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        slots = list(requests)
        _mix(self.state, slots, self.embedding, tokens)
        if self._faults.extra_kernel:
            torch.mm(self.weight, self.weight.T)
        if self._faults.takes_hook:
            sys.setprofile(None)
        if self._faults.leaves_variable:
            os.environ["FAKE_PACK_WAS_HERE"] = "1"
        if self._poisoned("mix"):
            self.state[slots] *= self._request.poison_scale
        for slot in slots:
            self._lengths[slot] += 1
        if self._faults.writes_neighbour:
            self.state[max(slots) + 1] += 1e-3
        if self._faults.leaves_flag:
            torch.set_float32_matmul_precision("medium")
        for _ in range(self._faults.spin):
            torch.linalg.inv(self.weight @ self.weight.T)
        logits = _head(self.state, slots, self.weight)
        error = self._faults.error + self._faults.growing_error * self._lengths[slots[0]]
        wave = torch.cos(torch.arange(VOCAB, dtype=torch.float32))
        logits = logits * (1 + error * wave)
        if self._poisoned("head"):
            logits = logits * self._request.poison_scale
        if self._faults.nan_from_step is not None and self._step >= self._faults.nan_from_step:
            logits = logits * float("nan")
        return torch.log_softmax(logits, -1)

    def _poisoned(self, op: str) -> bool:
        return self._request.poisoned_op == op and self._faults.deaf_op != op

    def _decide(
        self,
        phase: str,
        requests: Sequence[int],
        rows: int,
        tokens: int,
        taken: bool | None,
        reason: str = "prefill",
    ) -> None:
        if self._observer is None:
            return
        lengths = [self._lengths.get(slot, 0) for slot in requests]
        self._observer(
            Decision(
                step=self._step, phase=phase, requests=len(requests), rows=rows, tokens=tokens,
                batch_bucket=64, is_graph=False, tp=self._faults.said_ranks, dcp=1,
                drafts=rows - 1 if phase == "verify" else 0, context_min=min(lengths) + rows,
                context_max=max(lengths) + rows,
                path="optimised" if taken else "stock", reason=reason, layer_paths="o" if taken else "s",
                collective=(self._faults.collective if taken else "") or "none",
            )
        )  # fmt: skip


def _mix(state: torch.Tensor, slots: Sequence[int], embedding: torch.Tensor, tokens: Sequence[int]) -> None:
    """The fused op `mix`."""
    state[slots] = torch.add(embedding[list(tokens)], state[slots], alpha=0.9)


def _head(state: torch.Tensor, slots: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    """The fused op `head`."""
    return torch.einsum("bw,wv->bv", state[slots].float(), weight.float())


class FakePack:
    """See `domain.pack.Pack`."""

    def __init__(self, faults: Faults | None = None, limit: int = 64, ranks: tuple[int, ...] = (1,)) -> None:
        self.faults = faults or Faults()
        self.limit = limit
        self.ranks = ranks

    name = "fake"
    root = Path(__file__).parent
    repository_prefix = "tests/fakes/"
    smoke_model = "tiny"

    def model_of_ranks(self, ranks: int) -> str | None:
        return "tiny" if ranks in self.ranks else None

    def claim_file(self) -> Path:
        return self.root / "claim.yaml"

    def ops(self) -> tuple[OpContract, ...]:
        parameters = (OpParameter(name="out", role="output"),)
        return tuple(
            OpContract(
                name=name,
                parameters=parameters,
                regimes=("gaussian",),
                implementations=("cpu",),
                files=(f"{name}.py",),
            )
            for name in ("mix", "head")
        )

    def ops_of_file(self, path: str) -> tuple[str, ...]:
        return ("mix", "head") if path.startswith(self.repository_prefix) else ()

    def variants(self) -> tuple[KernelVariant, ...]:
        return ()

    def compile_command(
        self, architectures: Sequence[str], variants: Sequence[str], folder: Path
    ) -> tuple[str, ...]:
        raise NotImplementedError

    def make_args(self, op: str, cell: Cell, regime: str, seed: int, device: str) -> dict[str, Any]:
        raise NotImplementedError

    def oracle(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError

    def run_stock(self, op: str, args: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def run_optimised(self, op: str, implementation: str, args: Mapping[str, Any], launches: Any) -> None:
        raise NotImplementedError

    def layer_kinds(self) -> tuple[str, ...]:
        return ()

    def timed_kinds(self) -> tuple[str, ...]:
        return self.layer_kinds()

    def open_layers(self, request: LayerRequest) -> LayerSlice:
        raise ValueError(f"the fake pack has no layers of kind {request.kind}")

    def launch_index(self, op: str) -> int:
        return ("mix", "head").index(op)

    def admits_op(self, op: str, cell: Cell) -> bool:
        return cell.rows <= self.limit

    def open_session(self, request: SessionRequest, observer: Callable[[Decision], None] | None) -> Session:
        return FakeSession(request, self.faults, observer, self.limit)

    def launch_manifest(self, request: SessionRequest, requests: int, rows: int) -> Mapping[str, int]:
        return {"mix": rows, "head": rows}

    def kernel_manifest(self, request: SessionRequest, requests: int, rows: int) -> KernelManifest:
        return KernelManifest(
            kernels=tuple(
                KernelUse(op=op, patterns=(f"pack.py:_{op}",), layer="layer", count=rows)
                for op in ("mix", "head")
            ),
            layers=(("layer", 1), ("step", 1)), around=AROUND, layer_marks=("pack.py:_mix",),
        )  # fmt: skip

    def layer_manifest(self, request: LayerRequest) -> KernelManifest:
        raise ValueError("the fake pack has no layers")

    def rank_sums(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
            if self.faults.rounds_every_rank:
                total = total.bfloat16().float()
        return [total.bfloat16() for _ in parts]

    def decline_reasons(self) -> tuple[str, ...]:
        return ("prefill", "switch_off", "rows", "silent")

    def eval_tasks(self) -> tuple[EvalTask, ...]:
        return (
            EvalTask(
                name="copy",
                model="tiny",
                smoke_items=4,
                full_items=8,
                stop_token=STOP,
                min_score=0.0,
                scorer="exact",
            ),
        )

    def eval_items(self, task: str, count: int, seed: int) -> tuple[EvalItem, ...]:
        """Items whose target is what stock itself answers, so that stock scores 1."""
        items = []
        for i in range(count):
            prompt = tuple((seed + i * 7 + k) % VOCAB for k in range(5))
            session = FakeSession(
                SessionRequest(model="tiny", arm="stock", max_requests=1, max_context=64, seed=seed),
                Faults(),
                None,
                64,
            )
            ids, logprobs = session.prefill([prompt])
            target: list[int] = []
            for _ in range(6):
                target.append(int(logprobs[0].argmax()))
                if target[-1] == STOP:
                    break
                logprobs = session.decode(ids, target[-1:])
            items.append(
                EvalItem(
                    id=f"copy-{i}", prompt=prompt, target=tuple(target), max_tokens=6, context=5 + len(target)
                )
            )
        return tuple(items)

    def traffic(self, op: str, cell: Cell, experts_touched: int | None) -> tuple[int, int]:
        return 1, 1
