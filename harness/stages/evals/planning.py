"""Which evals a claim calls for, at which batch and context, so that small-batch kernels are graded at small
batch.
"""

from collections.abc import Iterator

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName, Threshold
from harness.domain.machine import Tier
from harness.domain.pack import EvalTask
from harness.domain.record import Scalar
from harness.domain.stage import PlanRequest

__all__ = ["DEFAULTS", "drift_tokens", "plan"]

DEFAULTS: dict[str, float] = {
    "drift_factor": 2.0,
    "drift_floor_kl": 1e-9,
    "drift_slope_factor": 2.0,
    "margin": 0.03,
    "min_top1_agreement": 0.99,
    "poison_items": 1,
}
"""Thresholds where the policy names none. `drift_factor`: the optimised arm's mean KL to the oracle over
stock's own; `margin`: the loss of score that non-inferiority must exclude."""
DRIFT_STEPS = 96
DRIFT_STEPS_FULL = 1024
DRIFT_COST_S = 14.0
"""Measured on 2 cores with the nano model, three arms and the poisoned one."""
BATCH = 8
PROMPT_COST_S, STEP_COST_S = 0.5, 0.03
"""Measured on 2 cores with the canary model: a prompt through one arm, and a decode step of up to a batch."""


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """One drift check, and one check an embedded task that the policy asks for (all where it names none)."""
    proof = request.policy.proof(StageName.EVALS)
    wanted = proof.subjects if proof is not None else ()
    return tuple(check for check in _all_checks(request) if not wanted or check.subject in wanted)


def drift_tokens(is_full: bool) -> int:
    """Positions along which drift is measured."""
    return DRIFT_STEPS_FULL if is_full else DRIFT_STEPS


def _all_checks(request: PlanRequest) -> Iterator[Check]:
    arch = request.machine.arch
    missing = None
    if request.claim.envelope.level(arch) != "dispatched":
        missing = f"the claim does not dispatch on {arch}"
    yield _drift(request, arch, missing)
    for task in request.pack.eval_tasks():
        yield _task(request, task, arch, missing)


def _drift(request: PlanRequest, arch: str, missing: str | None) -> Check:
    steps = drift_tokens(request.is_full)
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("kind", "drift"), ("model", request.pack.smoke_model), ("seed", request.seed), ("steps", steps),
        ("prompt", 16), ("poison_scale", 1.05), ("implementation", _implementation(arch)),
    )  # fmt: skip
    cell = Cell.model_validate({"arch": arch, "batch": 2, "context": 16 + steps})
    return Check(
        id=f"evals/drift/{request.pack.smoke_model}",
        stage=StageName.EVALS,
        proves="along a text the optimised path stays as near the float64 oracle as stock, without growth",
        cell=cell,
        subject="drift",
        thresholds=_thresholds(request),
        parameters=parameters,
        tier=_tier(arch),
        cost_s=DRIFT_COST_S * steps / DRIFT_STEPS,
        unavailable=missing,
    )


def _task(request: PlanRequest, task: EvalTask, arch: str, missing: str | None) -> Check:
    items = task.full_items if request.is_full else task.smoke_items
    passes = 2 * -(-items // BATCH) + 1  # both arms, and the poisoned one on the first items
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("kind", "task"), ("model", task.model), ("seed", request.seed), ("items", items), ("batch", BATCH),
        ("stop", task.stop_token), ("scorer", task.scorer), ("tail_tokens", task.tail_tokens),
        ("min_score", task.min_score), ("poison_scale", 2.0), ("implementation", _implementation(arch)),
    )  # fmt: skip
    return Check(
        id=f"evals/{task.name}/{task.model}",
        stage=StageName.EVALS,
        proves=f"on {task.name} the optimised path answers no worse than stock, on the same items",
        cell=Cell.model_validate({"arch": arch, "batch": 8, "context": 1024}),
        subject=task.name,
        thresholds=_thresholds(request),
        parameters=parameters,
        tier=_tier(arch),
        cost_s=PROMPT_COST_S * items * 2 + STEP_COST_S * task.answer_tokens * passes,
        unavailable=missing,
    )


def _thresholds(request: PlanRequest) -> tuple[Threshold, ...]:
    proof = request.policy.proof(StageName.EVALS)
    values: dict[str, float | int | str | bool] = {
        **DEFAULTS,
        "alpha": request.policy.statistics.alpha,
        "power": request.policy.statistics.power,
        "min_path_share": request.policy.min_path_share,
        **(dict(proof.thresholds) if proof is not None else {}),
    }
    return tuple(Threshold(name=key, value=values[key]) for key in sorted(values))


def _implementation(arch: str) -> str:
    return "cpu" if arch == "cpu" else "cute"


def _tier(arch: str) -> Tier:
    return Tier.SMOKE if arch == "cpu" else Tier.RANK
