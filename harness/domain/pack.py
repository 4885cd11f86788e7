"""What a kernel package offers so that it can be judged. The harness knows packs only through this protocol.

Packs register a zero-argument factory under the entry-point group `fasttrack.packs`. Tensors are `Any` here:
the nouns must not import torch. Invariant: creating a pack and asking for its names, files and claim imports
neither torch nor cutlass.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

from harness.domain.cell import Cell
from harness.domain.record import Record, Whole

__all__ = [
    "Arm", "Decision", "EvalItem", "EvalTask", "Generation", "KernelManifest", "KernelUse", "KernelVariant",
    "LayerCounts", "LayerError",
    "LayerRequest", "LayerSlice", "OpContract", "OpParameter",
    "Pack",
    "Session", "SessionRequest",
]  # fmt: skip

Tensor = Any
"""A `torch.Tensor`; typed loosely so that importing the nouns loads no torch."""
Arm = Literal["stock", "optimised"]


class Decision(Record):
    """What the dispatcher decided for one step. The ledger is a sequence of these."""

    step: Whole
    phase: str
    requests: Whole
    rows: Whole
    """Rows per request in the step (prompt tokens in a prefill)."""
    tokens: Whole
    batch_bucket: Whole | None
    """Upper edge of the bucket, None outside the envelope."""
    is_graph: bool
    tp: Whole
    dcp: Whole
    drafts: Whole
    context_min: Whole
    context_max: Whole
    path: Arm
    reason: str
    """`taken`, or the reason code of a decline."""
    layer_paths: str
    """One letter a layer: `o` optimised, `s` stock."""
    collective: str = "none"
    tuned: str = ""
    """Which kernels take a tuned choice, and whether from the entry of this shape or from the nearest; empty:
    what is built in."""

    @classmethod
    def of(cls, decided: object) -> Self:
        """The record of what has its fields, such as a dispatcher's own decision; a record is itself."""
        if isinstance(decided, cls):
            return decided
        return cls.model_validate({name: getattr(decided, name) for name in cls.model_fields})


class OpParameter(Record):
    """One keyword argument of an op."""

    name: str
    role: Literal["weight", "activation", "index", "state", "output", "workspace", "scalar"]
    is_exact: bool = False
    token_axis: Whole | None = 0


class OpContract(Record):
    """An op as the harness sees it, without code."""

    name: str
    parameters: tuple[OpParameter, ...]
    regimes: tuple[str, ...]
    implementations: tuple[Literal["cpu", "cute"], ...]
    files: tuple[str, ...]
    """Repository paths whose change invalidates evidence about this op."""
    is_deterministic: bool = False
    """Whether the pack says that equal calls give equal bits; a run that differs then fails the op."""


class KernelVariant(Record):
    """One kernel at one set of compile-time constants, to be compiled in a child process for one
    architecture.
    """

    op: str
    name: str
    architectures: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    """Tensor parameters in launch order, each with its role."""
    source: str
    """Repository path of the kernel's module."""
    is_smoke: bool
    max_cluster: Whole = 1
    expected: tuple[tuple[str, Whole], ...] = ()
    sizes: tuple[tuple[str, str], ...] = ()
    """What bounds each size that its grids depend on (`x.0`: size 0 of parameter x; `a7`: argument 7, a
    number): `tokens` or `requests` of a step, `rows` of a request or `ranks` of a group, which the claim
    says, or a range such as `6..96`."""
    limits_file: str = ""
    """Repository path of the file that `expected` is from, as `fasttrack audit expect` writes it; empty where
    there is none. A change that loosens a limit in it is told."""


class KernelUse(Record):
    """One kernel of an optimised step, as the pack declares it."""

    op: str
    """Op whose kernel it is; for what torch does on the path's behalf, a word such as `embedding`."""
    patterns: tuple[str, ...]
    """What a trace calls it: shell patterns, any of which fits. On a CPU a function of the pack is
    `<file below the pack's folder>:<function>` and a torch operator `aten::<name>`."""
    layer: str
    """Kind of layer that it runs in, or `step` for what runs once a step."""
    count: Whole
    """Launches in one such layer (or step). 0: must never be seen there."""
    is_fused: bool = True
    """Whether an optimised op is at work, rather than torch on its behalf."""


class KernelManifest(Record):
    """Every kernel of one optimised step: what a trace of it must show, no more and no less."""

    kernels: tuple[KernelUse, ...]
    layers: tuple[tuple[str, Whole], ...]
    """How many layers of each kind a step runs, over all ranks; `step` counts 1 a rank."""
    around: tuple[str, ...] = ()
    """Patterns of what the engine itself runs before and behind the step, such as copies of its inputs."""
    layer_marks: tuple[str, ...] = ()
    """Patterns of what a layer begins with, in either arm: where a time line is cut."""
    marks_per_layer: Whole = 1
    collective: str = ""
    """How ranks meet by these kernels, in the dispatcher's own word; empty: the pack does not say."""

    def expected(self) -> dict[str, int]:
        """Launches of one step by op."""
        times, found = dict(self.layers), dict[str, int]()
        for use in self.kernels:
            found[use.op] = found.get(use.op, 0) + use.count * times.get(use.layer, 0)
        return found


class SessionRequest(Record):
    """How to open a model for one arm."""

    model: str
    """A preset of the pack, such as `nano` or `canary`."""
    arm: Arm
    implementation: Literal["cpu", "cute"] = "cpu"
    tp: Whole = 1
    max_requests: Whole
    max_context: Whole
    drafts: Whole = 0
    kv_dtype: Literal["bf16", "fp8"] = "bf16"
    seed: Whole = 0
    """Of synthetic weights, where the model has no trained ones."""
    is_graph: bool = False
    poisoned_op: str | None = None
    """Op whose output is made visibly wrong on the optimised path."""
    poison_scale: float = 1.05
    """Factor on the poisoned op's output (for integer outputs the pack says what it does instead)."""
    is_oracle: bool = False
    """Run the float64 oracle instead of either arm (small models only)."""
    kept_prefixes: Whole = 0
    """Prompt prefixes to keep for later requests; 0: no prefix caching."""
    prefill_chunk: Whole = 0
    """Prompt tokens that go through the model at once; 0: the pack's own choice."""
    cache: str = ""
    """Folder where compiled kernels may be kept; empty: none."""


class Session(Protocol):
    """A model with its caches and slots, driven step by step.

    Log-probabilities are fp32 [rows, vocab] tensors.
    """

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """Take new requests in; gives their ids and the log-probabilities after each last prompt
        token, [B, vocab].
        """

    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One decode step: append one token to each request; log-probabilities of the next one, [B,
        vocab].
        """

    def verify(
        self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> Tensor:
        """One speculative step: `rows[i]` draft rows for request i, then keep the first `accepted[i]`.

        Gives log-probabilities for every row, [sum of rows, vocab].
        """

    def finish(self, requests: Sequence[int]) -> None:
        """Free the slots and pages of requests."""

    def launches(self) -> Mapping[str, int]:
        """Kernel launches of optimised ops by op, counted by the kernels themselves since the session
        opened.
        """

    def watched(self) -> Mapping[str, Tensor]:
        """Every tensor reachable from the engine by name: weights, caches, slots, shared buffers."""

    def writable(self, requests: Sequence[int]) -> Mapping[str, Tensor]:
        """Boolean masks (same shapes as in `watched`) of what a decode step of `requests` may write."""

    def switch(self, arm: Arm) -> None:
        """Turn the optimised path on or off between steps; state stays."""

    def prefix_counters(self) -> tuple[int, int, int]:
        """Prompts that asked for a kept prefix, those that found one, and tokens that it spared."""

    def expert_choices(self) -> tuple[int, Sequence[Sequence[int]]]:
        """How many experts a layer has (0: none), and those of each row of the last step in its last MoE
        layer; no rows where a single row's choice is made inside another kernel.
        """

    def close(self) -> None:
        """Release everything; the process is then as if the session had never been."""


class LayerRequest(Record):
    """Whole layers of one rank, to be timed in both arms."""

    kind: str
    """Such as `kda_moe`: which layers."""
    layout: str
    """How the optimised arm divides over ranks what stock keeps whole: `whole` (not at all) or `sharded`."""
    tp: Whole
    batch: Whole
    context: Whole
    layers: Whole
    """Distinct layers that one pass runs through, so that nothing stays in cache."""
    seed: Whole
    cache: str
    """Folder where compiled kernels may be kept."""


class LayerCounts(Record):
    """What one pass of an arm asks of the device, a layer on average."""

    kernels: float
    """Prefetches not counted."""
    prefetches: float
    memory_operations: float
    experts: float
    """Distinct experts that the step's tokens chose."""
    moved_bytes: float
    """Weights once, states and cache rows, by formula."""
    is_optimised: bool
    """Whether the kernels' own counters show every fused op in every layer, and nothing else ran."""


class LayerError(NamedTuple):
    """How far one token's output of one layer is from float64, on equal inputs."""

    arm: str
    layer: int
    token: int
    error: float
    """Relative L2."""


class LayerSlice(Protocol):
    """Some full-width layers of one rank, ready to run as stock runs them and through the fused ops."""

    @property
    def stock_arms(self) -> tuple[str, ...]:
        """Every way in which stock may run them; the fastest is what counts."""

    def replay(self, arm: str) -> Callable[[], None]:
        """`optimised` or a stock arm, captured: each call puts one pass over all layers on the stream."""

    def reset(self, arm: str) -> None:
        """Puts the residual stream back to where a pass begins."""

    def counts(self, arm: str) -> LayerCounts:
        """Of one pass, a layer."""

    def errors(self) -> Sequence[LayerError]:
        """Of `optimised` and `stock` in single layers."""

    def read_gb_per_s(self) -> float:
        """What a kernel that only reads reaches here, over far more than the cache."""

    def absent_exchanges(self) -> tuple[str, ...]:
        """Between ranks: what neither arm waits for here."""

    def close(self) -> None:
        """Release the step's memory; weights may stay for the next request."""


class EvalItem(Record):
    """One question of an embedded task, already in tokens."""

    id: str
    prompt: tuple[Whole, ...]
    target: tuple[Whole, ...]
    """Expected tokens, stop token included."""
    max_tokens: Whole
    context: Whole
    """Tokens of prompt and target together."""
    prefix_tokens: Whole = 0
    """For the `mrcr` scorer: how many tokens of the target the answer must start with, and which are then
    removed.
    """


class Generation(Record):
    """What a model answered to one item."""

    item: str
    tokens: tuple[Whole, ...]
    finish: Literal["stop", "length", "error"]


class EvalTask(Record):
    """An embedded task that the pack can generate and score."""

    name: str
    """Such as `mrcr_canary`."""
    model: str
    """Preset that answers it."""
    smoke_items: Whole
    full_items: Whole
    stop_token: Whole
    scorer: Literal["exact", "mrcr", "tail"]
    """The harness's own scorer: whole answer, the official MRCR rule on tokens, or the target's last tokens
    alone.
    """
    tail_tokens: Whole = 0
    min_score: float
    """Stock must reach it, or the eval proves nothing."""
    answer_tokens: Whole = 16
    """About how many tokens an answer has: what an eval takes is planned from it."""


class Pack(Protocol):
    """A kernel package under judgement."""

    @property
    def name(self) -> str: ...

    @property
    def root(self) -> Path:
        """Folder of the package."""

    @property
    def repository_prefix(self) -> str:
        """Where the package lies in its repository, such as `kernels/k3_decode/`."""

    def claim_file(self) -> Path:
        """The claim beside the kernels."""

    def ops(self) -> tuple[OpContract, ...]:
        """Every fused op."""

    def ops_of_file(self, path: str) -> tuple[str, ...]:
        """Ops whose evidence a change of this repository path invalidates; empty: none."""

    def variants(self) -> tuple[KernelVariant, ...]:
        """Every compiled kernel. Reads descriptions only; compiles nothing."""

    def compile_command(
        self, architectures: Sequence[str], variants: Sequence[str], folder: Path
    ) -> tuple[str, ...]:
        """Command line of a child process that compiles variants for each architecture and leaves
        `<architecture>/<name>.{ptx,cubin,sass,json}` in folder.
        """

    def make_args(
        self, op: str, cell: Cell, regime: str, seed: int, device: str, model: str
    ) -> dict[str, Any]:
        """Fresh arguments of one call at the shapes of a preset's rank; outputs poisoned.

        Raises `ValueError` where the preset cannot be divided by the cell's `tp`, or lacks the op.
        """

    def touched(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """For each `state` argument, a boolean mask of the elements that a call may change."""

    def oracle(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Float64 or exact truth of every written argument."""

    def run_stock(self, op: str, args: Mapping[str, Any]) -> None:
        """The stock composition, in place."""

    def run_optimised(self, op: str, implementation: str, args: Mapping[str, Any], launches: Tensor) -> None:
        """The optimised op, in place; adds to `launches`."""

    def bind_optimised(
        self, op: str, implementation: str, args: Mapping[str, Any], launches: Tensor
    ) -> Callable[[], None]:
        """The optimised op on these arguments, weights laid out as at load time; timed and captured."""

    def open_layers(self, request: LayerRequest) -> LayerSlice:
        """Layers of one rank of the claimed model; raises `ValueError` for what it cannot build."""

    def layer_kinds(self) -> tuple[str, ...]:
        """Kinds of layers; empty where the pack has no layer benchmark."""

    def timed_kinds(self) -> tuple[str, ...]:
        """What `LayerRequest.kind` may be: kinds of layers, and single ops timed in a layer's place."""

    def launch_index(self, op: str) -> int:
        """Place of an op in the launch counters."""

    def admits_op(self, op: str, cell: Cell) -> bool:
        """Whether the pack's own guard takes the optimised op in this cell."""

    def open_session(self, request: SessionRequest, observer: Callable[[Decision], None] | None) -> Session:
        """Load a model for one arm. The observer is called once a step, before it runs, with a `Decision` or
        with anything that has its fields: making a record each step costs more than keeping one.
        """

    @property
    def smoke_model(self) -> str:
        """Preset that a CPU drives in milliseconds a step, such as `nano`."""

    def model_of_ranks(self, ranks: int) -> str | None:
        """Small preset that so many ranks of one process can share, on a CPU or on one GPU; None: there is
        none.
        """

    @property
    def claimed_model(self) -> str:
        """Preset that the claim speaks of, such as `k3`: rank shapes of kernel tests and benchmarks."""

    def launch_manifest(self, request: SessionRequest, requests: int, rows: int) -> Mapping[str, int]:
        """Kernel launches by op that one optimised step of this session must make; ops that do not run are
        absent.
        """

    def kernel_manifest(self, request: SessionRequest, requests: int, rows: int) -> KernelManifest:
        """What a trace of one optimised step of this session must show."""

    def layer_manifest(self, request: LayerRequest) -> KernelManifest:
        """What a trace of one optimised pass over such layers must show."""

    def rank_sums(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """What each rank holds after the pack's reduction of one part a rank, all in this process."""

    def decline_reasons(self) -> tuple[str, ...]:
        """The closed list of reason codes that the dispatcher gives."""

    def eval_tasks(self) -> tuple[EvalTask, ...]:
        """Embedded tasks; empty where the pack has no trained model."""

    def eval_items(self, task: str, count: int, seed: int) -> tuple[EvalItem, ...]:
        """Items of an embedded task; the same seed gives the same items."""

    def traffic(self, op: str, cell: Cell, experts_touched: int | None) -> tuple[int, int]:
        """(bytes, floating-point operations) that one call must move and do, from formulas."""
