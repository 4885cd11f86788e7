"""The door between the harness and the K3 pack: `harness.domain.pack.Pack` over ops, kernels, model and
canary.

Nothing else of the package knows the harness. Creating the pack and asking for names, files and the claim
imports neither torch nor cutlass, and neither does planning while `description.json` is up to date; what runs
something imports on use.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from harness.domain import pack as door
from harness.domain.cell import Cell
from harness.domain.collective_model import CollectiveModel, CollectiveTrial
from harness.domain.errors import InputError
from harness.domain.tuning import Configuration, TuningAxis, TuningSpace
from k3_decode.description import FILE, load_description, render_description
from k3_decode.launch_sizes import launch_sizes
from k3_decode.ops.contract import OP_NAMES as OPS

if TYPE_CHECKING:  # the rest of the package needs torch
    from k3_decode.ops.contract import Cell as OpCell
    from k3_decode.session import SessionSpec

__all__ = ["K3DecodePack", "live_contracts", "live_variants", "main"]

ROOT = Path(__file__).resolve().parent
PREFIX = "kernels/k3_decode/"
EXPECTED = ROOT / "cute" / "expected.json"
"""What each kernel may cost on each architecture, as `fasttrack audit expect` wrote it."""
RECORDS = (".md", ".svg", ".jsonl")
"""Suffixes of files that nothing runs by."""
LAYER_KINDS = ("kda_moe", "mla_moe")
"""What the layer benchmark times: an attention and the MoE behind it."""
OP_KINDS = (
    "op.attn_res", "op.kda_in", "op.kda_step", "op.mla_in", "op.mla_query", "op.mla_attend", "op.mla_value",
    "op.attention_out", "op.moe_front", "op.router", "op.experts", "op.situ_mlp", "op.latent_tail", "op.head",
)  # fmt: skip
"""Single ops that are timed beside their peers (`peers/op_arms.py`)."""
PLAYED_RANKS = {1: "nano", 2: "nano", 4: "nano_h16", 8: "nano_h16", 16: "nano_h16"}
"""Presets that ranks of one process share."""
MRCR_LENGTHS = (256, 512)
MRCR_LENGTHS_FULL = (256, 512, 1024, 2048, 4096, 8192)
CHAIN_TOKENS = (500,)
CHAIN_TOKENS_FULL = (500, 1000, 2048, 4000)
CHAIN_TAIL = 5
"""ANSWER, three digits, END."""


class K3DecodePack:
    """See `harness.domain.pack.Pack`."""

    name = "k3_decode"
    root = ROOT
    repository_prefix = PREFIX
    smoke_model = "nano"
    claimed_model = "k3"

    def __init__(self) -> None:
        """Raises `InputError` where a tuned table of this package is none."""
        _check_tables(is_built=False)

    def model_of_ranks(self, ranks: int) -> str | None:
        """Nano for one or two ranks, a wider one for more."""
        return PLAYED_RANKS.get(ranks)

    def claim_file(self) -> Path:
        """`claim.yaml` beside the kernels."""
        return ROOT / "claim.yaml"

    def ops(self) -> tuple[door.OpContract, ...]:
        """Every fused op, as its `OpSpec` says."""
        return _contracts()

    def ops_of_file(self, path: str) -> tuple[str, ...]:
        """The op that a file is named after; none for prose and records; every op for all else, as an oracle,
        a composition, a peer or the weights may decide any of them.
        """
        if not path.startswith(PREFIX):
            return ()
        folder, _, name = path.removeprefix(PREFIX).rpartition("/")
        stem, suffix = Path(name).stem, Path(name).suffix
        if folder in ("ops", "cpu", "cute") and stem in OPS:
            return (stem,)
        return () if suffix in RECORDS else OPS

    def variants(self) -> tuple[door.KernelVariant, ...]:
        """Descriptions of every compiled kernel."""
        return _variants()

    def compile_command(
        self, architectures: Sequence[str], variants: Sequence[str], folder: Path
    ) -> tuple[str, ...]:
        """`python -m k3_decode.compile`, one process for all architectures."""
        # -P: a folder of that name where the user stands is not this package
        command = (sys.executable, "-P", "-m", "k3_decode.compile")
        asked = (word for architecture in architectures for word in ("--arch", architecture))
        return (*command, *asked, "--out", str(folder), *variants)

    def make_args(
        self, op: str, cell: Cell, regime: str, seed: int, device: str, model: str
    ) -> dict[str, Any]:
        """Arguments from the op's own `make_args`."""
        import torch

        from k3_decode.ops import OPS as SPECS

        generator = torch.Generator().manual_seed(seed)
        return SPECS[op].make_args(_op_cell(cell, model), regime, generator, torch.device(device))

    def touched(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Masks of what a call may change of its state."""
        from k3_decode.ops import OPS as SPECS

        masks = SPECS[op].touched
        return {} if masks is None else masks(dict(args))

    def oracle(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """The op's float64 oracle."""
        from k3_decode.ops import OPS as SPECS

        return SPECS[op].oracle(dict(args))

    def run_stock(self, op: str, args: Mapping[str, Any]) -> None:
        """The op's stock composition."""
        from k3_decode.ops import OPS as SPECS

        SPECS[op].stock(**args)

    def run_optimised(self, op: str, implementation: str, args: Mapping[str, Any], launches: Any) -> None:
        """The fused op of an implementation, weights laid out on the way."""
        self.bind_optimised(op, implementation, args, launches)()

    def bind_optimised(
        self, op: str, implementation: str, args: Mapping[str, Any], launches: Any
    ) -> Callable[[], None]:
        """The fused op with its weights prepared."""
        from k3_decode.binding import bind

        return bind(op, implementation, args, launches)

    def layer_kinds(self) -> tuple[str, ...]:
        """KDA and MLA layers, each with its MoE."""
        return LAYER_KINDS

    def timed_kinds(self) -> tuple[str, ...]:
        """The layers, and single ops beside their peers."""
        return (*LAYER_KINDS, *OP_KINDS)

    def open_layers(self, request: door.LayerRequest) -> door.LayerSlice:
        """Layers of one rank beside stock's; needs a GPU and the packed peers."""
        from k3_decode.peers.layer_arms import Case
        from k3_decode.peers.layer_slice import KINDS, open_slice

        if request.kind in OP_KINDS:
            from k3_decode.peers.op_slice import open_op

            family = "mla" if request.kind.startswith("op.mla") else "kda"
            case = Case(family, request.tp, request.batch, request.context)
            found = open_op(request.kind, case, request.layers, request.seed, Path(request.cache))
            return cast("door.LayerSlice", found)
        kind = KINDS.get(request.kind, request.kind)
        case = Case(kind, request.tp, request.batch, request.context if kind == "mla" else 0)
        layout = cast("Literal['whole', 'sharded']", request.layout)
        slice_ = open_slice(request.kind, layout, case, request.layers, request.seed, Path(request.cache))
        return cast("door.LayerSlice", slice_)

    def launch_index(self, op: str) -> int:
        """Place in the launch counters."""
        return OPS.index(op)

    def admits_op(self, op: str, cell: Cell) -> bool:
        """What the dispatcher itself says of a step in this cell."""
        from k3_decode.dispatch import Dispatcher, Reason, Site, StepFacts, load_guard

        site = Site(cell.arch, cell.tp, cell.dcp, cell.kv_dtype, 1, True)
        dispatcher = Dispatcher(load_guard(), site)
        dispatcher.is_on = True
        rows = (cell.drafts + 1,) * cell.batch
        facts = StepFacts(0, cell.phase, rows, False, cell.context, cell.context)
        return dispatcher.decide(facts).reason is Reason.TAKEN

    def open_session(
        self, request: door.SessionRequest, observer: Callable[[door.Decision], None] | None
    ) -> door.Session:
        """A model on one arm, or the oracle."""
        from k3_decode.session import ModelSession, OracleSession

        _check_tables(is_built=request.implementation != "cpu")
        spec = _spec(request)
        if request.is_oracle:
            return cast("door.Session", OracleSession(spec))
        # The dispatcher's own decision has every field of the record that a listener may want.
        listener = cast("Callable[[Any], None] | None", observer)
        return cast("door.Session", ModelSession(spec, listener))

    def launch_manifest(self, request: door.SessionRequest, requests: int, rows: int) -> Mapping[str, int]:
        """Launches by op of one optimised step."""
        from k3_decode.session import launches_of_a_step

        return launches_of_a_step(_spec(request), requests * rows)

    def kernel_manifest(self, request: door.SessionRequest, requests: int, rows: int) -> door.KernelManifest:
        """Kernels of one optimised step, by kind of layer."""
        from k3_decode.session import kernels_of_a_step

        uses, layers = kernels_of_a_step(_spec(request), requests * rows)
        return _manifest(uses, layers, "in_process" if request.tp > 1 else "none")

    def layer_manifest(self, request: door.LayerRequest) -> door.KernelManifest:
        """Kernels of one pass over the layers of a benchmark."""
        import torch

        from k3_decode.manifest import pass_manifest
        from k3_decode.op_table import load_ops
        from k3_decode.shapes import PRESETS

        shapes = PRESETS[self.claimed_model].rank(request.tp)
        table = load_ops("cute", shapes, torch.device("meta"))
        uses = pass_manifest(table, "cute", request.batch, request.kind, shapes.shared_inter)
        return _manifest(uses, {request.kind: request.layers})

    def rank_sums(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The in-process reduction, each rank with its part."""
        from k3_decode.collectives import reduce, run_ranks

        return run_ranks([reduce(part, len(parts)) for part in parts])

    def collective_models(self) -> tuple[CollectiveModel, ...]:
        """The exchanges between GPUs, as models."""
        from k3_decode.collectives.models import collective_models

        return collective_models()

    def collective_trials(self) -> tuple[CollectiveTrial, ...]:
        """The same on GPUs."""
        return (
            CollectiveTrial("exchange", (2, 4, 8, 16), _trial_command, "exchange"),
            CollectiveTrial("exchange_fused", (2, 4, 8, 16), _fused_trial_command, "exchange"),
            CollectiveTrial("engine", (2,), _engine_trial_command, "exchange"),
        )

    def decline_reasons(self) -> tuple[str, ...]:
        """The dispatcher's closed list."""
        from k3_decode.dispatch import Reason

        return tuple(str(reason) for reason in Reason if reason is not Reason.TAKEN)

    def eval_tasks(self) -> tuple[door.EvalTask, ...]:
        """The canary's tasks, where its weights are there."""
        if not (ROOT / "canary" / "weights.safetensors").is_file():
            return ()
        from k3_decode.canary.vocabulary import END

        return (
            door.EvalTask(
                name="mrcr_canary", model="canary", smoke_items=8, full_items=192, stop_token=END,
                min_score=0.95, scorer="exact",
            ),
            door.EvalTask(
                name="chain_canary", model="canary", smoke_items=4, full_items=96, stop_token=END,
                min_score=0.95, scorer="tail", tail_tokens=CHAIN_TAIL, answer_tokens=CHAIN_TOKENS[0],
            ),
        )  # fmt: skip

    def eval_items(self, task: str, count: int, seed: int) -> tuple[door.EvalItem, ...]:
        """Items spread over the task's lengths; many items use the long lengths too."""
        from k3_decode.canary.tasks import chain_samples, mrcr_samples

        is_mrcr = task == "mrcr_canary"
        smoke, full = (MRCR_LENGTHS, MRCR_LENGTHS_FULL) if is_mrcr else (CHAIN_TOKENS, CHAIN_TOKENS_FULL)
        lengths = full if count > 32 else smoke
        items: list[door.EvalItem] = []
        for place, length in enumerate(lengths):
            share = count // len(lengths) + (place < count % len(lengths))
            make = mrcr_samples if is_mrcr else chain_samples
            items += [
                door.EvalItem(
                    id=f"{task}-{length}-{sample.index}", prompt=sample.prompt, target=sample.answer,
                    max_tokens=len(sample.answer) + 8, context=len(sample.prompt) + len(sample.answer),
                )
                for sample in make(seed, share, length)
            ]  # fmt: skip
        return tuple(items)

    def tuning_space(self, op: str, implementation: str, cell: Cell, model: str) -> TuningSpace | None:
        """The choices of an op in a cell."""
        from k3_decode.tuning import space_of

        found = space_of(op, implementation, _op_cell(cell, model))
        if found is None:
            return None
        return TuningSpace(
            kernel=found.kernel, op=op, implementation=cast("Literal['cpu', 'cute']", implementation),
            shape=tuple(found.shape.items()), near=found.near,
            axes=tuple(TuningAxis(name=n, values=values, meaning=m) for n, values, m in found.axes),
            incumbent=tuple(found.incumbent.items()),
        )  # fmt: skip

    def refused(self, space: TuningSpace, configuration: Configuration) -> str:
        """Why a configuration cannot be built or launched."""
        from k3_decode.tuning import refused

        return refused(space.kernel, dict(space.shape), dict(configuration))

    def floor_us(
        self, space: TuningSpace, configuration: Configuration, moved_bytes: int, ceiling_gb_per_s: float
    ) -> float:
        """Least time of one call by what it moves and keeps in flight."""
        from k3_decode.tuning import floor_us

        shape, values = dict(space.shape), dict(configuration)
        return floor_us(space.kernel, shape, values, moved_bytes, ceiling_gb_per_s)

    def configured(self, space: TuningSpace, configuration: Configuration) -> AbstractContextManager[None]:
        """Launches of this process at the space's shape take the configuration."""
        from k3_decode.tuning import ARCH, tried

        arch = "cpu" if space.implementation == "cpu" else ARCH
        return tried(arch, space.kernel, dict(space.shape), dict(configuration))

    def build_configurations(
        self, space: TuningSpace, configurations: Sequence[Configuration], folder: Path, processes: int
    ) -> None:
        """Kernels of configurations as object files, compiled side by side."""
        from k3_decode.tuning import build

        choices = [dict(configuration) for configuration in configurations]
        build(space.op, space.kernel, dict(space.shape), choices, folder, processes)

    def built(self, space: TuningSpace, folder: Path) -> AbstractContextManager[None]:
        """Launches load what lies in `folder`; nothing changes where nothing is compiled."""
        if space.implementation == "cpu":
            return nullcontext()
        from k3_decode.kernel_objects import use_objects

        return use_objects(folder)

    def tuned_file(self, arch: str) -> Path:
        """The tuned table of an architecture, below this package."""
        from k3_decode.tuned import table_file

        return table_file(arch)

    def traffic(self, op: str, cell: Cell, experts_touched: int | None) -> tuple[int, int]:
        """Bytes and operations at the claimed model's rank shapes."""
        from k3_decode.traffic import traffic

        return traffic(op, _op_cell(cell, self.claimed_model), experts_touched)


def _trial_command(ranks: int, is_played: bool, results: Path) -> tuple[str, ...]:
    """The exchanges' trial: by one process that plays all ranks, or by a process a GPU."""
    return _ranks_command(
        ("-m", "k3_decode.collectives.trial", "--epochs", "10000"), ranks, is_played, results
    )


def _fused_trial_command(ranks: int, is_played: bool, results: Path) -> tuple[str, ...]:
    """The fused exchanges' and context parallelism's."""
    return _ranks_command(("-m", "k3_decode.collectives.trial_fused"), ranks, is_played, results)


def _engine_trial_command(ranks: int, is_played: bool, results: Path) -> tuple[str, ...]:
    """A served model whose ranks meet by exchanges."""
    return _ranks_command(("-m", "k3_decode.trial_engine"), ranks, is_played, results)


def _ranks_command(program: tuple[str, ...], ranks: int, is_played: bool, results: Path) -> tuple[str, ...]:
    module = (*program, "--out", str(results))
    if is_played:
        return (sys.executable, "-P", *module, "--ranks", str(ranks))
    return (
        sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
        *module,
    )  # fmt: skip


def live_contracts() -> tuple[door.OpContract, ...]:
    """Every fused op from its `OpSpec`; imports torch."""
    from k3_decode.ops import OPS as SPECS

    found = []
    for name in OPS:
        spec = SPECS[name]
        kinds = tuple(k for k in ("cpu", "cute") if (ROOT / k / f"{name}.py").is_file())
        found.append(
            door.OpContract(
                name=name,
                parameters=tuple(
                    door.OpParameter(
                        name=p.name, role=p.role.value, is_exact=p.is_exact, token_axis=p.token_axis
                    )
                    for p in spec.params
                ),
                regimes=spec.regimes,
                implementations=cast("tuple[Literal['cpu', 'cute'], ...]", kinds),
                files=tuple(f"{PREFIX}{k}/{name}.py" for k in ("ops", *kinds)),
                is_deterministic=True,
            )
        )
    return tuple(found)


def live_variants() -> tuple[door.KernelVariant, ...]:
    """Every compiled kernel from its module, with what audits found that it costs; imports torch and
    cutlass.
    """
    from k3_decode.compile import all_variants

    _check_tables(is_built=True)
    measured: dict[str, dict[str, int]] = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {}

    return tuple(
        door.KernelVariant(
            op=v.op, name=v.name, architectures=v.architectures, parameters=v.parameters,
            source=PREFIX + v.source,
            is_smoke=v.is_smoke, max_cluster=v.max_cluster,
            expected=(*v.expected, *measured.get(v.name, {}).items()),
            limits_file=PREFIX + EXPECTED.relative_to(ROOT).as_posix(),
        )
        for v in all_variants()
    )  # fmt: skip


@lru_cache(maxsize=1)
def _contracts() -> tuple[door.OpContract, ...]:
    described = load_description()
    if described is None:
        return live_contracts()
    return tuple(door.OpContract.model_validate(op) for op in described["ops"])


@lru_cache(maxsize=1)
def _variants() -> tuple[door.KernelVariant, ...]:
    described = load_description()
    if described is None:
        found = live_variants()
    else:
        found = tuple(door.KernelVariant.model_validate(variant) for variant in described["variants"])
    return tuple(v.model_copy(update={"sizes": launch_sizes(v.op, v.parameters)}) for v in found)


def _op_cell(cell: Cell, model: str) -> "OpCell":
    from k3_decode.ops.contract import Cell as OpCell
    from k3_decode.shapes import PRESETS

    return OpCell(PRESETS[model].rank(cell.tp), cell.batch, cell.drafts + 1, cell.context, cell.kv_dtype)


def _spec(request: door.SessionRequest) -> "SessionSpec":
    from k3_decode.session import PREFILL_CHUNK, SessionSpec

    return SessionSpec(
        model=request.model, implementation=request.implementation, is_on=request.arm == "optimised",
        tp=request.tp, max_requests=request.max_requests, max_context=request.max_context,
        drafts=request.drafts, kv_dtype=request.kv_dtype, seed=request.seed, poisoned_op=request.poisoned_op,
        poison_scale=request.poison_scale, is_graph=request.is_graph, kept_prefixes=request.kept_prefixes,
        prefill_chunk=request.prefill_chunk or PREFILL_CHUNK,
        cache=Path(request.cache) if request.cache else None,
    )  # fmt: skip


def _check_tables(*, is_built: bool) -> None:
    """Read the tuned tables; whether what they choose can be built takes the compiler to tell."""
    from k3_decode.tuned import TableError
    from k3_decode.tuning import check_tables

    try:
        check_tables(is_built=is_built)
    except TableError as error:
        raise InputError(str(error)) from error


def _manifest(uses: Sequence[Any], layers: Mapping[str, int], collective: str = "") -> door.KernelManifest:
    from dataclasses import asdict

    from k3_decode.manifest import AROUND, LAYER_MARKS, MARKS_PER_LAYER

    return door.KernelManifest(
        kernels=tuple(door.KernelUse.model_validate(asdict(use)) for use in uses),
        layers=tuple(layers.items()), around=AROUND, layer_marks=LAYER_MARKS,
        marks_per_layer=MARKS_PER_LAYER, collective=collective,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the description, or say whether it is up to date (exit code 1: it is not)."""
    parser = argparse.ArgumentParser(prog="python -m k3_decode.pack")
    parser.add_argument("--write", action="store_true", help="needs torch and the kernel compiler")
    if parser.parse_args(argv).write:
        ops = [op.model_dump(mode="json") for op in live_contracts()]
        variants = [variant.model_dump(mode="json") for variant in live_variants()]
        FILE.write_text(render_description(ops, variants), encoding="utf-8")
    is_fresh = load_description() is not None
    sys.stdout.write(f"{FILE.name} is {'up to date' if is_fresh else 'of other sources; run with --write'}\n")
    return 0 if is_fresh else 1


if __name__ == "__main__":
    sys.exit(main())
