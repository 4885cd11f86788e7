"""Which cells each op is tried in: the edges of the claim's envelope, at shapes that this machine can afford.

One check tries one op in one cell over its input regimes; one more asks the pack's guard at both sides of
every edge. A full cross product says nothing that its edges do not: each axis is walked with the others held,
and corners join them. Contexts and dtypes that do not change what an op must move and compute
(`Pack.traffic`) are dropped for it.
"""

import hashlib
from collections.abc import Iterable, Iterator

from harness.domain.cell import Arch, Cell
from harness.domain.check import Check, StageName, Threshold
from harness.domain.claim import Envelope
from harness.domain.machine import Tier
from harness.domain.pack import OpContract
from harness.domain.record import Scalar
from harness.domain.stage import PlanRequest
from harness.stages.kernels.collectives import plan_collectives
from harness.stages.kernels.growth import plan_growth

__all__ = ["edge_cells", "outside_cells", "plan"]

CONTROL_STEP = 1.25
"""The control's error, as a multiple of the bound it must exceed."""
SMOKE_BATCHES, SMOKE_CONTEXTS = (1, 3, 8), (1, 64, 65, 200, 2100)
"""On a CPU: a page of 64 tokens and one more, a context of several pages, and one of more keys than an
implementation takes at once (a running maximum rescales from the second chunk on). 3 is no bucket's edge."""
CONTEXTS = (1, 63, 64, 65, 1024, 4096, 65536)
SMOKE_BYTES, SMOKE_OPERATIONS = 12 * 2**20, 10**9
"""Most that one call at the claimed model's rank shapes may move and compute on a CPU."""
ALL_EXPERTS = 4096
"""More experts than a model has: weights of all of them are made, whatever one call touches."""
COST_S = {"cpu": 0.03, "cute": 0.1}
"""Seconds of one regime in one cell: arguments, oracle, both arms and the checks around them."""
FIXED_COST_S = 0.1
"""Seconds of a check's controls, repeats and records: 69 checks with 254 regimes took 11.4 s on a CPU."""
SPREADS = ("repeats", "mates", "order")
"""What either arm's own answers may differ over (`measure.spread`)."""
REPLAYS = ("graph0", "graph1", "graph2", "turns0", "turns1", "jitter")
"""Regimes that only a GPU has (`measure.replays`)."""
MAX_SHARED_OPERATIONS = 0.99
"""Share of stock's torch operations that a candidate may repeat before it counts as stock by another name."""


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """The pack's own collectives, and its ops on this machine's architecture; where the policy wants more,
    also those of other dispatched ones.
    """
    proof = request.policy.proof(StageName.KERNELS)
    subjects = proof.subjects if proof else ()
    wanted = proof.tier if proof else Tier.SMOKE
    here = request.machine.arch
    checks: list[Check] = [*plan_collectives(request)]
    for architecture in request.claim.envelope.architectures:
        needs = Tier.SMOKE if architecture.arch == "cpu" else Tier.RANK
        if architecture.level != "dispatched" or (
            architecture.arch != here and needs.strength > wanted.strength
        ):
            continue
        for op in request.pack.ops():
            if not subjects or op.name in subjects:
                checks += _op_checks(request, op, architecture.arch, needs)
    return tuple(checks)


def edge_cells(envelope: Envelope, arch: Arch, is_smoke: bool) -> tuple[Cell, ...]:
    """Cells at the envelope's edges, every axis in turn; the envelope admits all of them."""
    wanted = SMOKE_CONTEXTS if is_smoke else (*CONTEXTS, envelope.context.max)
    contexts = _within(wanted, envelope.context.min, envelope.context.max)
    buckets = {envelope.batch.min, *envelope.batch_buckets}
    sizes = SMOKE_BATCHES if is_smoke else buckets | {edge + 1 for edge in buckets}
    batches = _within(sizes, envelope.batch.min, envelope.batch.max)
    drafts = _within((0, 1, envelope.drafts.max), envelope.drafts.min, envelope.drafts.max)
    base = Cell(
        arch=arch,
        tp=envelope.tp[0],
        dcp=envelope.dcp[0],
        batch=batches[min(1, len(batches) - 1)],
        context=contexts[len(contexts) // 2],
        drafts=drafts[0],
        kv_dtype=envelope.kv_dtypes[0],
        phase="decode" if "decode" in envelope.phases else envelope.phases[0],
    )
    found = [base]
    found += [base.model_copy(update={"batch": b}) for b in batches]
    found += [base.model_copy(update={"context": c, "batch": batches[0]}) for c in contexts]
    if not is_smoke:
        # Two such requests fill more than 2 GiB of cache: an offset kept in 32 bits goes wrong here.
        found.append(base.model_copy(update={"context": contexts[-1]}))
    found += [_with_drafts(base, d, batches) for d in drafts]
    found += [base.model_copy(update={"kv_dtype": d}) for d in envelope.kv_dtypes]
    found += [base.model_copy(update={"tp": t}) for t in envelope.tp]
    if not is_smoke:
        # The most blocks that a rank's kernels ever have, and the longest that memory holds up their stores.
        found += [base.model_copy(update={"tp": t, "batch": batches[-1]}) for t in envelope.tp]
    return tuple(dict.fromkeys(c for c in found if envelope.admits(c)))


def outside_cells(envelope: Envelope, arch: Arch) -> tuple[Cell, ...]:
    """Cells one step outside of each edge, which the guard must decline."""
    base = edge_cells(envelope, arch, True)[0]
    drafts = max(envelope.drafts.max, 1)
    over = envelope.max_rows_per_step // (drafts + 1) + 1
    found = [
        base.model_copy(update={"batch": envelope.batch.max + 1}),
        base.model_copy(update={"context": envelope.context.max + 1}),
        base.model_copy(update={"drafts": envelope.drafts.max + 1, "phase": "verify"}),
        base.model_copy(update={"tp": max(envelope.tp) * 2}),
        base.model_copy(update={"dcp": max(envelope.dcp) * 2}),
        base.model_copy(update={"phase": "mixed"}),
    ]
    if over <= envelope.batch.max and drafts in envelope.drafts:
        found.append(base.model_copy(update={"batch": over, "drafts": drafts, "phase": "verify"}))
    found += [
        base.model_copy(update={"arch": a.arch}) for a in envelope.architectures if a.level == "compiled"
    ]
    return tuple(c for c in found if not envelope.admits(c))


def _op_checks(request: PlanRequest, op: OpContract, arch: Arch, needs: Tier) -> Iterator[Check]:
    """The guard's check, and one for each cell and model."""
    implementation = "cpu" if arch == "cpu" else "cute"
    here = request.machine.arch
    missing = None if arch == here else f"needs a machine with {arch}; this one has {here}"
    yield _guard_check(request, op, arch, needs)
    if implementation not in op.implementations:
        yield _check(request, op, Cell(arch=arch), None, (), needs, missing)
        return
    yield from plan_growth(request, op, arch, needs, missing)
    seen: set[tuple[object, ...]] = set()
    for model, cells in _models(request, arch):
        for number, cell in enumerate(cells):
            work = request.pack.traffic(op.name, cell, None)
            # What an op leaves in a cache has the cache's dtype, whatever it moves and computes.
            written = cell.kv_dtype if any(p.role == "state" for p in op.parameters) else None
            key = (model, cell.tp, cell.batch, cell.drafts, written, *work)
            is_claimed = arch == "cpu" and model == request.pack.claimed_model
            if key in seen or (is_claimed and not _is_affordable(request, op, cell)):
                continue
            seen.add(key)
            regimes = op.regimes
            if arch == "cpu" and not request.is_full:
                is_all = not is_claimed and _is_all_regimes(cell, number, cells)
                regimes = _some_regimes(op.regimes, number, is_all)
            yield _check(request, op, cell, model, regimes, needs, missing)


def _models(request: PlanRequest, arch: Arch) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    """(preset, its cells). A CPU walks the edges at the small model, and takes one rank of the claimed one.

    The small model is not divided: a rank's shapes are what changes with `tp`, and the claimed rank has them.
    """
    envelope = request.claim.envelope
    cells = edge_cells(envelope, arch, is_smoke=arch == "cpu")
    if arch != "cpu":
        yield request.pack.claimed_model, cells
        return
    whole = tuple(c for c in cells if c.tp == min(envelope.tp))
    yield request.pack.smoke_model, whole
    if request.pack.claimed_model != request.pack.smoke_model:
        yield request.pack.claimed_model, (whole[0].model_copy(update={"tp": max(envelope.tp)}),)


def _some_regimes(regimes: tuple[str, ...], number: int, is_all: bool) -> tuple[str, ...]:
    """All of them, or the first and, in turn, one more."""
    if is_all or len(regimes) < 2:
        return regimes
    return (regimes[0], regimes[1 + number % (len(regimes) - 1)])


def _is_all_regimes(cell: Cell, number: int, cells: tuple[Cell, ...]) -> bool:
    """Cells that code reaches by a branch of its own: the first, another cache dtype, the longest context."""
    return number == 0 or cell.kv_dtype != cells[0].kv_dtype or cell.context == max(c.context for c in cells)


def _is_affordable(request: PlanRequest, op: OpContract, cell: Cell) -> bool:
    """Whether a CPU can make and run an op at the claimed model's shapes, all experts counted."""
    moved, operations = request.pack.traffic(op.name, cell, ALL_EXPERTS)
    return moved <= SMOKE_BYTES and operations <= SMOKE_OPERATIONS


def _check(
    request: PlanRequest,
    op: OpContract,
    cell: Cell,
    model: str | None,
    regimes: tuple[str, ...],
    needs: Tier,
    missing: str | None,
) -> Check:
    """One op in one cell; without a model it says that the implementation is missing."""
    check_id = f"kernels/{op.name}/{model or 'missing'}/{cell.label()}"
    implementation = "cpu" if cell.arch == "cpu" else "cute"
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("model", model),
        ("implementation", implementation),
        ("regimes", ",".join(regimes)),
        ("seed", _seed(request.seed, check_id)),
        ("outputs", _written(op, "output")),
        ("states", _written(op, "state")),
        ("by_token", _by_token(op)),
        ("spread", ",".join(SPREADS)),
        ("replays", "" if implementation == "cpu" else ",".join(REPLAYS)),
        ("is_deterministic", op.is_deterministic),
    )
    return Check(
        id=check_id,
        stage=StageName.KERNELS,
        proves=f"{op.name} is as close to the float64 oracle as stock, writes all it must and nothing else.",
        cell=cell,
        op=op.name,
        thresholds=_thresholds(request),
        parameters=parameters,
        tier=needs,
        cost_s=COST_S[implementation] * max(1, len(regimes)) + FIXED_COST_S,
        unavailable=missing,
    )


def _guard_check(request: PlanRequest, op: OpContract, arch: Arch, needs: Tier) -> Check:
    """Asking the guard needs no GPU: it runs wherever the plan does."""
    return Check(
        id=f"kernels/{op.name}/guard/{arch}",
        stage=StageName.KERNELS,
        proves=f"The guard takes {op.name} at every edge of the envelope and declines one step outside.",
        cell=Cell(arch=arch),
        op=op.name,
        parameters=(("model", None), ("implementation", "guard"), ("regimes", ""), ("seed", 0)),
        tier=Tier.SMOKE,
        cost_s=0.01,
    )


def _thresholds(request: PlanRequest) -> tuple[Threshold, ...]:
    acceptance = request.policy.acceptance
    proof = request.policy.proof(StageName.KERNELS)
    values: dict[str, float | int | str | bool] = {
        "factor": acceptance.factor,
        "floor_ulp": acceptance.floor_ulp,
        "hard_cap": acceptance.hard_cap,
        "control_step": CONTROL_STEP,
        "max_shared_operations": MAX_SHARED_OPERATIONS,
    }
    values |= dict(proof.thresholds) if proof else {}
    return tuple(Threshold(name=name, value=value) for name, value in values.items())


def _written(op: OpContract, role: str) -> str:
    """Names of what an op writes, so that samples which leave one out can be told."""
    return ",".join(p.name for p in op.parameters if p.role == role)


def _by_token(op: OpContract) -> str:
    """Names of the outputs that have a row a token, so that samples which leave rows out can be told."""
    return ",".join(p.name for p in op.parameters if p.role == "output" and p.token_axis is not None)


def _seed(seed: int, check_id: str) -> int:
    """A seed of the check's own, from the plan's."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{check_id}".encode()).digest()[:4]) >> 1


def _within(values: Iterable[int], low: int, high: int) -> list[int]:
    """Values inside a range, with its ends where none is."""
    found = sorted({v for v in values if low <= v <= high})
    return found or sorted({low, high})


def _with_drafts(base: Cell, drafts: int, batches: list[int]) -> Cell:
    """The base cell as a verify step of several requests, where there are drafts."""
    if not drafts:
        return base
    return base.model_copy(
        update={"drafts": drafts, "phase": "verify", "batch": batches[min(1, len(batches) - 1)]}
    )
