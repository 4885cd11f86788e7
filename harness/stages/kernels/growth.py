"""Errors of an op over the length of its context: they may not outgrow stock's by more than the policy says.

One check an op and architecture, for ops whose work depends on the context (`Pack.traffic`). Each context and
seed gives a row a token; a line is fitted through the logarithms of the worst errors per context, in units of
what stock and rounding allow, against the logarithm of the context. A bound at each single context lets a
slow growth pass until it is too long to try; the slope does not. Table `growth` (context, seed, arm, output,
token, error, allowed): the arms are the candidate and, as a control, the same with an error that grows with
the root of the context.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import log2, sqrt
from typing import Any

from harness.domain.cell import Arch, Cell
from harness.domain.check import (
    Check,
    Control,
    Figure,
    Outcome,
    Samples,
    SampleTable,
    StageName,
    Status,
    Threshold,
    judged,
)
from harness.domain.machine import Tier
from harness.domain.pack import OpContract
from harness.domain.stage import PlanRequest, StageContext
from harness.domain.table_shape import COUNT, NUMBER, TEXT, TableShape, choice, misshapen, unusable

__all__ = ["GROWTH", "context_slope", "judge_growth", "plan_growth", "sample_growth"]

GROWTH = "growth"
"""Value of the check's parameter `part`."""
CPU_CONTEXTS, GPU_CONTEXTS = (128, 512, 2048, 8192), (1024, 8192, 65536, 524288)
SEEDS = 3
MAX_CONTEXT_SLOPE = 0.25
"""Of log error to log context, where the policy names none: an error that doubles while the context grows 16
times. Rounding errors of a sum grow with the root of its length in both arms, which cancels."""
PLANTED_SHARE = 0.5
"""Of what is allowed, at the shortest context."""
COLUMNS = ("context", "seed", "arm", "output", "token", "error", "allowed")
SHAPES = {
    "growth": TableShape(
        {
            "context": COUNT, "seed": COUNT, "arm": choice("optimised", "planted"), "output": TEXT,
            "token": COUNT, "error": NUMBER, "allowed": NUMBER,
        },
        key=("context", "seed", "arm", "output", "token"), is_required=True,
    )
}  # fmt: skip
NEXT_STEPS = {
    Status.FAIL: "find the sum that is longer than stock's, or kept in fewer bits, and split it",
    Status.NO_EVIDENCE: "give the op contexts whose errors can be told from rounding",
}


def plan_growth(
    request: PlanRequest, op: OpContract, arch: Arch, needs: Tier, missing: str | None
) -> Iterator[Check]:
    """One check where longer contexts mean more work for the op, and several are in the envelope."""
    envelope = request.claim.envelope
    wanted = CPU_CONTEXTS if arch == "cpu" else GPU_CONTEXTS
    base = Cell(arch=arch, batch=envelope.batch.min, tp=min(envelope.tp))
    cells = [base.model_copy(update={"context": c}) for c in wanted]
    cells = [c for c in cells if envelope.admits(c)]
    if len({request.pack.traffic(op.name, c, None) for c in cells}) < 3:
        return
    implementation = "cpu" if arch == "cpu" else "cute"
    acceptance, proof = request.policy.acceptance, request.policy.proof(StageName.KERNELS)
    limits: dict[str, Any] = {"factor": acceptance.factor, "floor_ulp": acceptance.floor_ulp}
    limits |= {"max_context_slope": MAX_CONTEXT_SLOPE} | (dict(proof.thresholds) if proof else {})
    yield Check(
        id=f"kernels/{op.name}/growth/{arch}",
        stage=StageName.KERNELS,
        proves=f"Errors of {op.name} do not grow with its context faster than stock's.",
        cell=cells[0],
        op=op.name,
        thresholds=tuple(Threshold(name=name, value=value) for name, value in limits.items()),
        parameters=(
            ("model", request.pack.smoke_model if arch == "cpu" else request.pack.claimed_model),
            ("implementation", implementation), ("part", GROWTH), ("regimes", op.regimes[0]),
            ("contexts", ",".join(str(c.context) for c in cells)), ("seed", request.seed % 2**31),
            ("outputs", ",".join(p.name for p in op.parameters if p.role == "output" and not p.is_exact)),
        ),
        tier=needs,
        cost_s=1.0 if arch == "cpu" else 10.0,
        unavailable=missing,
    )  # fmt: skip


def sample_growth(check: Check, contract: OpContract, context: StageContext) -> Samples:
    """Every context and seed, candidate beside stock and oracle."""
    from harness.measure.trial import Trial, release_memory, without_gradients

    rows: list[tuple[Any, ...]] = []
    contexts = [int(c) for c in str(check.parameter("contexts")).split(",")]
    if check.cell is None:
        raise AssertionError(f"{check.id} was planned without a cell")
    with without_gradients():
        for length in contexts:
            trial = Trial(
                pack=context.pack, contract=contract, cell=check.cell.model_copy(update={"context": length}),
                model=str(check.parameter("model")), implementation=str(check.parameter("implementation")),
                seed=int(check.parameter("seed") or 0), device="cpu" if check.cell.arch == "cpu" else "cuda",
            )  # fmt: skip
            for seed in range(SEEDS):
                rows += _errors(check, trial, seed, length / contexts[0])
    release_memory()
    table = SampleTable(name="growth", columns=COLUMNS, rows=tuple(rows))
    return Samples(check=check.id, tier=context.tier, tables=(table,))


def _errors(check: Check, trial: Any, seed: int, times_longer: float) -> Iterator[tuple[Any, ...]]:
    """Rows of one call: the candidate's errors, and those of a copy that an error was planted in."""
    from harness.measure.trial import error_rows, run_pair

    regime = str(check.parameter("regimes"))
    pair = run_pair(trial, trial.arguments(regime, seed))
    found: Iterator[Any] = error_rows(trial, regime, pair, pair.optimised.guarded.args)
    for _, output, token, stock, optimised, _, _, ulp, _ in found:
        allowed = check.number("factor") * stock + check.number("floor_ulp") * ulp
        planted = allowed * PLANTED_SHARE * sqrt(times_longer)
        for arm, error in (("optimised", optimised), ("planted", sqrt(optimised**2 + planted**2))):
            yield (trial.cell.context, seed, arm, output, token, error, allowed)


def judge_growth(check: Check, samples: Samples) -> Outcome:
    """FAIL where an output's error grows faster with the context than the policy allows. Pure."""
    if unfit := misshapen(samples, SHAPES):
        return unusable(check, samples, unfit)
    table = samples.table("growth")
    rows = table.records() if table else ()
    outputs = tuple(filter(None, str(check.parameter("outputs")).split(",")))
    lengths = [int(c) for c in str(check.parameter("contexts")).split(",")]
    lacking = [
        f"{arm} {output} at {length}"
        for arm, output, length in product(("optimised", "planted"), outputs, lengths)
        if not any((r["arm"], r["output"], r["context"]) == (arm, output, length) for r in rows)
    ]
    if lacking or not outputs:
        return unusable(check, samples, (f"no errors of {', '.join(lacking) or 'any output'}",))
    limit = check.number("max_context_slope")
    slopes = {output: _slope_of(rows, "optimised", output) for output in outputs}
    planted = {output: _slope_of(rows, "planted", output) for output in outputs}
    unseen = [output for output, slope in planted.items() if slope is None or slope <= limit]
    control = Control(
        kind="planted", description="the same outputs with an error that grows with the root of the context",
        failed=not unseen,
        observed=", ".join(f"{output}: slope {_words(slope)}" for output, slope in planted.items()),
    )  # fmt: skip
    figures = tuple(
        Figure(
            name=f"context_slope_{name}",
            value=slope,
            missing=None if slope is not None else "no error at all",
        )
        for name, slope in slopes.items()
    )
    steep = {name: slope for name, slope in slopes.items() if slope is not None and slope > limit}
    said = ", ".join(f"{name} {_words(slope)}" for name, slope in (steep or slopes).items())
    words = (
        f"slope of log error to log context over {lengths[0]} to {lengths[-1]} tokens: {said} "
        f"(limit {limit:g})"
    )
    return judged(check, samples, Status.FAIL if steep else Status.PASS, words, NEXT_STEPS, control, figures)


def _slope_of(rows: Sequence[Mapping[str, Any]], arm: str, output: str) -> float | None:
    """Over the contexts, of the worst share of what is allowed; None where nothing is wrong anywhere."""
    worst: dict[int, float] = {}
    for r in rows:
        if (r["arm"], r["output"]) == (arm, output) and r["allowed"]:
            share = float(r["error"]) / float(r["allowed"])
            worst[int(r["context"])] = max(worst.get(int(r["context"]), 0.0), share)
    return context_slope({length: share for length, share in worst.items() if share})


def context_slope(errors: Mapping[int, float]) -> float | None:
    """Least-squares slope of log error to log context; None for fewer than two contexts."""
    points = [(log2(length), log2(error)) for length, error in errors.items()]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    along: float = sum((x - mean_x) * (y - mean_y) for x, y in points)
    across: float = sum((x - mean_x) * (x - mean_x) for x, _ in points)
    return along / across


def _words(slope: float | None) -> str:
    return "none" if slope is None else f"{slope:.2f}"
