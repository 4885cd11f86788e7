"""A pack's own collectives, as models: no order of the ranks' steps may hang or give a wrong value.

A pack that uses the engine's collectives describes none. Table `orders` (version, states, is_complete,
fault): what trying every order gave for the collective and for its planted fault, the control.
"""

from harness.domain.check import (
    Check,
    Control,
    Figure,
    Finding,
    Outcome,
    Samples,
    SampleTable,
    Severity,
    StageName,
    Status,
    judged,
)
from harness.domain.collective_model import CollectiveModel
from harness.domain.pack import Pack
from harness.domain.stage import PlanRequest, StageContext
from harness.domain.table_shape import COUNT, FLAG, TEXT, TableShape, choice, misshapen, optional, unusable
from harness.measure.interleavings import explore
from harness.stages.kernels.collective_trials import (
    IMPLEMENTATION,
    judge_trials,
    plan_trials,
    sample_trials,
)

__all__ = ["IMPLEMENTATION", "judge_collective", "models_of", "plan_collectives", "sample_collective"]

SHAPES = {
    "orders": TableShape(
        {
            "version": choice("optimised", "planted"), "states": COUNT, "is_complete": FLAG,
            "fault": optional(TEXT),
        },
        key=("version",), is_required=True,
    )
}  # fmt: skip
NEXT_STEPS = {
    Status.FAIL: "follow the steps in the finding; order them by release and acquire, or by another buffer",
    Status.NO_EVIDENCE: "make the model small enough to be explored whole, and its planted fault real",
}


def models_of(pack: Pack) -> tuple[CollectiveModel, ...]:
    """Models of the pack's own collectives; none where it has no such function."""
    offer = getattr(pack, "collective_models", None)
    return () if offer is None else tuple(offer())


def plan_collectives(request: PlanRequest) -> tuple[Check, ...]:
    """One check a model, which needs no GPU, and the trials on GPUs."""
    models = tuple(
        Check(
            id=f"kernels/{model.name}/collective/every_order",
            stage=StageName.KERNELS,
            proves=f"No order of the ranks' steps makes {model.name} hang or read a wrong value.",
            subject=model.name,
            parameters=(("model", None), ("implementation", IMPLEMENTATION), ("regimes", ""), ("seed", 0)),
            cost_s=1.0,
        )
        for model in models_of(request.pack)
    )
    return (*models, *plan_trials(request))


def sample_collective(check: Check, context: StageContext) -> Samples:
    """Try every order of the model and of its planted fault; or run the trials."""
    if "ranks" in dict(check.parameters):
        return sample_trials(check, context)
    model = next(m for m in models_of(context.pack) if m.name == check.subject)
    rows = [("optimised", *explore(model, model.ranks)), ("planted", *explore(model, model.planted))]
    table = SampleTable(
        name="orders", columns=("version", "states", "is_complete", "fault"), rows=tuple(rows)
    )
    return Samples(check=check.id, tier=context.tier, tables=(table,))


def judge_collective(check: Check, samples: Samples) -> Outcome:
    """Wrong in any order fails; explored in part, or with a planted fault unseen, proves nothing. Pure."""
    if "ranks" in dict(check.parameters):
        return judge_trials(check, samples)
    if unfit := misshapen(samples, SHAPES):
        return unusable(check, samples, unfit)
    table = samples.table("orders")
    rows = {str(r["version"]): r for r in (table.records() if table else ())}
    if rows.keys() != {"optimised", "planted"}:
        return unusable(check, samples, ("the collective or its planted fault was not explored",))
    mine, planted = rows["optimised"], rows["planted"]
    control = Control(
        kind="planted", description="the same collective with a fault that some order shows",
        failed=planted["fault"] is not None, observed=str(planted["fault"] or "no order showed it")[:500],
    )  # fmt: skip
    figures = (Figure(name="states", value=int(mine["states"] or 0)),)
    findings: tuple[Finding, ...] = ()
    if mine["fault"] is not None:
        words = str(mine["fault"])
        findings = (Finding(rule="wrong_in_some_order", severity=Severity.ERROR, message=words),)
        return judged(check, samples, Status.FAIL, words[:600], NEXT_STEPS, control, figures, findings)
    if not mine["is_complete"]:
        words = f"{mine['states']} states were visited, and there are more"
        return judged(check, samples, Status.NO_EVIDENCE, words, NEXT_STEPS, control, figures)
    words = f"every order of the ranks' steps is right ({mine['states']} states)"
    return judged(check, samples, Status.PASS, words, NEXT_STEPS, control, figures)
