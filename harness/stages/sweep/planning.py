"""Which cells are timed: edges of the claim's envelope, as `sweeps/*.yaml` choose among them."""

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName, Threshold
from harness.domain.claim import Claim, Envelope
from harness.domain.demanded import demanded_cells
from harness.domain.errors import InputError
from harness.domain.machine import Tier
from harness.domain.record import Name, Record, Scalar
from harness.domain.resources import data_folder
from harness.domain.stage import PlanRequest

__all__ = ["DEFAULTS", "Grid", "Sweep", "all_sweeps", "load_sweep", "plan", "sweep_cells", "with_parts"]

DEFAULTS: dict[str, float] = {
    "min_ratio": 1.0,
    "max_noise": 0.25,
    "planted_slowdown": 0.6,
    "interval_width": 0.1,
    "blocks": 40,
    "time_s": 120.0,
    "error_factor": 2.0,
    "error_floor": 0.002,
    "min_expert_share": 0.4,
    "timer_tolerance": 0.1,
    "cold_tolerance": 0.25,
    "max_drift": 0.25,
    "min_noise": 0.005,
}
"""Where the policy names none. `min_ratio`: stock time over optimised time that a cell without a promise must
reach; `interval_width`: sampling stops when the ratio's interval is narrower (0: never), and `time_s`: or
when all arms together were timed for so long. A token of a layer may be
`error_factor` x stock + `error_floor` away from float64 (relative L2; half a unit in bf16's last place).
`min_expert_share`: distinct experts of a step, of those that an even router would choose; a real router
chooses about 0.57 of them (64 rows, 16 of 896), one that sees equal rows 0.03. `timer_tolerance`: share by
which the timer may miss a known duration; `cold_tolerance`: share by which a pass behind a flush of the cache
may take longer than one in a row; `max_drift`: how far stock may move from the first half of a run to the
second, or by the gain or the noise where they are more; `min_noise`: what equal work in other memory may
differ by, which no interval within a run tells (measured on an H200: bundles/null/h200_products.json)."""
COST_PER_CELL_S, COST_PER_ROW_S, COST_PER_PROMPT_TOKEN_S = 1.0, 0.08, 0.001
"""Measured on 2 cores with the nano model, four sessions: 22 s for five cells of 1 to 64 requests."""
WHOLE = "whole"
"""Layout whose layers do on one rank what the single ops do."""
COST_PER_LAYER_CELL_S = 4.0
"""On an H200: capture of five arms, one layer in float64, and the samples."""


class Grid(Record):
    """Axis values; `min`, `max` and `buckets` are taken from the claim's envelope."""

    batch: tuple[int | Literal["min", "max", "buckets"], ...] = Field(min_length=1)
    context: tuple[int, ...] = Field(min_length=1)
    tp: tuple[int, ...] = (1,)
    dcp: tuple[int, ...] = (1,)
    drafts: tuple[int, ...] = (0,)
    kv_dtype: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    max_batch_by_context: dict[int, int] = Field(default_factory=dict)
    """Largest batch timed at a context; longer contexts cost memory and prefill time."""


class Sweep(Record):
    """One sweep definition."""

    schema_version: Literal[1] = 1
    name: Name
    level: Literal["step", "layer"]
    phase: Literal["decode", "verify"]
    kinds: tuple[str, ...] = ()
    """Of layers, or single ops in their place; a pack that does not offer one is not asked for it."""
    layouts: tuple[str, ...] = ()
    parts: dict[str, dict[str, int]] = Field(default_factory=dict)
    """By kind of layer: the single ops that it is made of, and how many of each."""
    layers: int = Field(default=8, ge=1)
    """Layers of a pass: 2 GB each at TP8, so 8 leave L2, and 16 give the same times (measured).

    Of single ops, sets of weights.
    """
    smoke: Grid | None = None
    """None: only `--full` times it."""
    full: Grid

    @model_validator(mode="after")
    def _drafts_are_verified(self) -> Self:
        grids = [grid for grid in (self.smoke, self.full) if grid is not None]
        if any((drafts > 0) != (self.phase == "verify") for grid in grids for drafts in grid.drafts):
            raise ValueError("steps with drafts are of phase verify, and those without are not")
        return self


def load_sweep(path: Path) -> Sweep:
    """A sweep from YAML; raises `InputError` naming the file and the first wrong field."""
    try:
        return Sweep.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise InputError(
            f"{path}: no sweep can be read here: {str(error).splitlines()[0]}; see sweeps/README.md"
        ) from error


def all_sweeps() -> dict[str, Sweep]:
    """Every sweep of this repository by name, in the order of its files."""
    found = map(load_sweep, sorted(data_folder("sweeps").glob("*.yaml")))
    return {sweep.name: sweep for sweep in found}


def sweep_cells(sweep: Sweep, envelope: Envelope, arch: str, is_full: bool) -> tuple[Cell, ...]:
    """Cells of the sweep that the envelope admits, by rising context and batch."""
    grid = sweep.full if is_full else sweep.smoke
    if grid is None:
        return ()
    cells = []
    ranks = product(sorted(grid.tp), sorted(grid.dcp))
    axes = product(ranks, sorted(grid.context), sorted(grid.drafts), grid.kv_dtype)
    for (tp, dcp), context, drafts, kv_dtype in axes:
        for batch in sorted(_batches(grid, envelope)):
            cell = Cell.model_validate(
                {
                    "arch": arch, "tp": tp, "dcp": dcp, "batch": batch, "context": context,
                    "drafts": drafts, "kv_dtype": kv_dtype, "phase": sweep.phase,
                }
            )  # fmt: skip
            if batch <= grid.max_batch_by_context.get(context, batch) and envelope.admits(cell):
                cells.append(cell)
    return tuple(cells)


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """One check a cell and sweep, and one for each cell that the policy demands, whatever sweeps it wants.

    Raises `InputError` for a wanted sweep that there is not, and a demand that no sweep's steps can meet.
    """
    proof = request.policy.proof(StageName.SWEEP)
    known = all_sweeps()
    wanted = proof.subjects if proof is not None and proof.subjects else tuple(known)
    if unknown := [name for name in wanted if name not in known]:
        raise InputError(f"the policy asks for sweep {unknown[0]}, and there are {', '.join(known)}")
    demanded = _by_sweep(_demanded(request), known, wanted)
    checks: list[Check] = []
    for sweep in known.values():
        is_wanted = sweep.name in wanted
        if sweep.level == "step":
            checks += _checks(request, sweep, is_wanted, demanded.get(sweep.name, {}))
        elif is_wanted:
            checks += _layer_checks(request, sweep)
    return tuple(checks)


def _by_sweep(
    demanded: Mapping[Cell, int], known: Mapping[str, Sweep], wanted: Collection[str]
) -> dict[str, dict[Cell, int]]:
    """The sweep that times each demanded cell: of its phase, and a wanted one where there is one."""
    found: dict[str, dict[Cell, int]] = {}
    for cell, least in demanded.items():
        homes = [s.name for s in known.values() if s.level == "step" and s.phase == cell.phase]
        homes.sort(key=lambda name: name not in wanted)
        if not homes:
            raise InputError(
                f"the policy demands a step in {cell.label()}, and no sweep times steps of {cell.phase}"
            )
        found.setdefault(homes[0], {})[cell] = least
    return found


def _batches(grid: Grid, envelope: Envelope) -> set[int]:
    chosen: set[int] = set()
    for value in grid.batch:
        if value == "min":
            chosen.add(envelope.batch.min)
        elif value == "max":
            chosen.add(envelope.batch.max)
        elif value == "buckets":
            chosen |= {envelope.batch.min, *envelope.batch_buckets}
        else:
            chosen.add(value)
    return chosen


def _checks(
    request: PlanRequest, sweep: Sweep, is_wanted: bool, demanded: Mapping[Cell, int]
) -> Iterator[Check]:
    """Steps of the sweep's own cells, where it is wanted, and of those that are demanded of it."""
    arch = request.machine.arch
    thresholds = _thresholds(request)
    own = sweep_cells(sweep, request.claim.envelope, arch, request.is_full) if is_wanted else ()
    for cell in dict.fromkeys((*own, *demanded)):
        least = (Threshold(name="min_tokens", value=demanded[cell]),) if cell in demanded else ()
        parameters: tuple[tuple[str, Scalar], ...] = (
            ("model", request.pack.model_of_ranks(cell.tp) or request.pack.smoke_model),
            ("seed", request.seed), ("implementation", "cpu" if arch == "cpu" else "cute"),
            ("promise", _promise(request.claim, cell)),
            *_acceptance(request.claim, cell),
        )  # fmt: skip
        yield Check(
            id=f"sweep/{sweep.name}/{cell.label()}",
            stage=StageName.SWEEP,
            proves="an optimised decode step takes no longer than promised against stock, beyond the noise",
            cell=cell,
            subject=sweep.name,
            thresholds=tuple(sorted((*thresholds, *least), key=lambda threshold: threshold.name)),
            parameters=parameters,
            tier=Tier.SMOKE if arch == "cpu" else Tier.RANK,
            cost_s=COST_PER_CELL_S
            + cell.batch * cell.tp * (COST_PER_ROW_S + COST_PER_PROMPT_TOKEN_S * cell.context),
            unavailable=_missing(request, cell),
        )


def _demanded(request: PlanRequest) -> dict[Cell, int]:
    """Tokens that the optimised path must decode in each cell that the policy names."""
    proof = request.policy.proof(StageName.SWEEP)
    found: dict[Cell, int] = {}
    for demand in proof.cells if proof is not None else ():
        for cell, _ in demanded_cells(request.claim.envelope, request.machine.arch, demand):
            found[cell] = max(demand.min_tokens, found.get(cell, 0))
    return found


def _missing(request: PlanRequest, cell: Cell) -> str | None:
    """Why no step can be timed in a cell here; None where one can."""
    if request.claim.envelope.level(cell.arch) != "dispatched":
        return f"the claim does not dispatch on {cell.arch}"
    if cell.dcp > 1:
        return f"a context divided over {cell.dcp} ranks needs an engine that divides it"
    if request.pack.model_of_ranks(cell.tp) is None:
        return f"the pack has no small model that {cell.tp} ranks of one process can share"
    return None


def _acceptance(claim: Claim, cell: Cell) -> tuple[tuple[str, Scalar], ...]:
    """The golden tokens a verify step, of a cell with drafts; None where the claim has none."""
    if not cell.drafts:
        return ()
    return (("golden", None if claim.speculation is None else claim.speculation.golden_length(cell.drafts)),)


def _layer_checks(request: PlanRequest, sweep: Sweep) -> Iterator[Check]:
    """One check a kind of layer, layout and cell; none on an architecture without a GPU's graphs."""
    arch, envelope = request.machine.arch, request.claim.envelope
    if arch == "cpu" or envelope.level(arch) != "dispatched":
        return
    thresholds = _thresholds(request)
    offered = [kind for kind in sweep.kinds if kind in request.pack.timed_kinds()]
    for kind, layout in product(offered, sweep.layouts):
        for cell in sweep_cells(sweep, envelope, arch, request.is_full):
            if kind.startswith("kda") and cell.context != min(sweep.full.context):
                continue  # its state does not grow with the context
            yield Check(
                id=f"sweep/{sweep.name}/{kind}.{layout}/{cell.label()}",
                stage=StageName.SWEEP,
                proves="an optimised layer takes no longer than promised against the best stock one",
                cell=cell,
                subject=sweep.name,
                thresholds=thresholds,
                parameters=(
                    ("kind", kind),
                    ("layout", layout),
                    ("layers", sweep.layers),
                    ("seed", request.seed),
                    ("parts", _parts(sweep, kind) if layout == WHOLE else None),
                    (
                        "promise",
                        _promise(request.claim, cell, "layer", kind) if layout == "sharded" else None,
                    ),
                ),
                tier=Tier.RANK,
                cost_s=COST_PER_LAYER_CELL_S,
            )


def with_parts(check: Check, sweeps: Mapping[str, Sweep]) -> Check:
    """A whole layer's check with its parts as today's sweeps name them, where its plan is older than that."""
    told = dict(check.parameters)
    sweep = sweeps.get(check.subject or "")
    if sweep is None or told.get("layout") != WHOLE or told.get("parts"):
        return check
    kept = tuple(pair for pair in check.parameters if pair[0] != "parts")
    parts = _parts(sweep, str(told.get("kind")))
    return check.model_copy(update={"parameters": (*kept, ("parts", parts))})


def _parts(sweep: Sweep, kind: str) -> str | None:
    """The parts of a kind as `measure.levels` reads them."""
    counts = sweep.parts.get(kind, {})
    return " ".join(f"{part}*{count}" if count > 1 else part for part, count in counts.items()) or None


def _promise(claim: Claim, cell: Cell, level: str = "step", subject: str | None = None) -> float | None:
    """The claim's promised ratio in exactly this cell, if it makes one."""
    for promise in claim.speed:
        here = (promise.arch, promise.tp, promise.batch, promise.context)
        is_subject = subject is None or promise.subject == subject
        if promise.level == level and is_subject and here == (cell.arch, cell.tp, cell.batch, cell.context):
            return promise.ratio
    return None


def _thresholds(request: PlanRequest) -> tuple[Threshold, ...]:
    proof = request.policy.proof(StageName.SWEEP)
    values: dict[str, float | int | str | bool] = {
        **DEFAULTS,
        "alpha": request.policy.statistics.alpha,
        "min_path_share": request.policy.min_path_share,
        **(dict(proof.thresholds) if proof is not None else {}),
    }
    return tuple(Threshold(name=key, value=values[key]) for key in sorted(values))
