"""What the witnesses of a coverage check amount to. Pure: samples in, outcome out.

A check of the path passes only when ledger, counters and trace agree that the optimised path ran, and when
the same verdict over the switched-off run says that it did not.
"""

from collections.abc import Callable

from harness.domain.check import Check, Control, Figure, Outcome, Samples, Status, judged
from harness.domain.table_shape import misshapen, unusable
from harness.stages.coverage.causal import judge_causal
from harness.stages.coverage.judging_requests import (
    judge_feature,
    judge_prefix,
    judge_reuse,
    judge_verify,
)
from harness.stages.coverage.judging_state import judge_collective, judge_layer, judge_ledger, judge_state
from harness.stages.coverage.next_steps import next_steps
from harness.stages.coverage.rebuild import judge_rebuild
from harness.stages.coverage.tables import shapes_of
from harness.stages.coverage.witnesses import (
    KL_FLOOR,
    arm_rows,
    compare_builds,
    compare_collectives,
    figure,
    has_pair,
    kernels_differ,
    launches_per_step,
    ledger_objection,
    median_kl,
    show,
    step_rows,
    witness,
    worst_kl,
)

__all__ = ["judge"]


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome of one coverage check."""
    kind = str(check.parameter("kind"))
    if unfit := misshapen(samples, shapes_of(kind)):
        return unusable(check, samples, unfit)
    judges: dict[str, Callable[[Check, Samples], Outcome]] = {
        "path": _judge_path,
        "decline": _judge_decline,
        "uneven": _judge_decline,
        "poison": _judge_poison,
        "transition": _judge_transition,
        "state": judge_state,
        "ledger": judge_ledger,
        "verify": judge_verify,
        "prefix": judge_prefix,
        "reuse": judge_reuse,
        "feature": judge_feature,
        "collective": judge_collective,
        "layer": judge_layer,
        "rebuild": judge_rebuild,
        "causal": judge_causal,
    }
    return judges[kind](check, samples)


def _judge_path(check: Check, samples: Samples) -> Outcome:
    least = check.number("min_path_share")
    on = witness(samples, "on", least, int(check.number("min_tokens")))
    off = witness(samples, "off", least)
    control = Control(
        kind="switch_off",
        description="the same work with the switch off",
        failed=off.status is not Status.PASS and bool(arm_rows(samples, "steps", "off")),
        observed=off.words,
    )
    figures = (
        figure("path_share", on.share, "no token was decoded"),
        Figure(name="optimised_tokens", value=on.tokens),
        figure("kernels_per_step", launches_per_step(samples, "on"), "no optimised step ran"),
        figure("worst_kl_to_stock", worst_kl(samples, "on"), "log-probabilities are not finite"),
    )
    status, words = on.status, on.words
    if status is Status.PASS:
        status, words = _like_for_like(samples, words)
    if status is Status.PASS and (objection := ledger_objection(check, samples)):
        status, words = Status.FAIL, objection
    if status is Status.PASS and worst_kl(samples, "on") is None:
        status, words = Status.FAIL, "the optimised path gave log-probabilities that are not finite"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _like_for_like(samples: Samples, words: str) -> tuple[Status, str]:
    """INVALID where the arms differ in more than the switch, or not even in that."""
    objection = compare_builds(samples) or compare_collectives(samples)
    if not objection and not kernels_differ(samples):
        objection = "both arms ran the same kernels, so nothing was compared"
    return (Status.INVALID, objection) if objection else (Status.PASS, words)


def _judge_decline(check: Check, samples: Samples) -> Outcome:
    steps = step_rows(samples, "on", decode_only=check.subject != "prefill")
    taken = [row for row in steps if row["path"] == "optimised"]
    reasons = sorted({str(row["reason"]) for row in steps})
    launched = sum(int(row["counted"] or 0) for row in arm_rows(samples, "launches", "on"))
    worst = worst_kl(samples, "on")
    listed = str(check.parameter("reasons") or "").split()
    unlisted = [reason for reason in reasons if reason not in listed]
    twin = witness(samples, "twin", 1.0)
    control = Control(
        kind="twin",
        description="a step just inside the envelope",
        failed=twin.status is Status.PASS,
        observed=f"taken: {twin.words}",
    )
    figures = (
        Figure(name="declined_steps", value=len(steps) - len(taken), note=", ".join(reasons)),
        figure("worst_kl_to_stock", worst, "log-probabilities are not finite"),
    )
    if not steps:
        status, words = Status.NO_EVIDENCE, "the ledger holds no step"
    elif taken or launched:
        status = Status.FAIL
        words = f"{len(taken)} of {len(steps)} steps took the optimised path ({launched} launches)"
    elif unlisted:
        status = Status.FAIL
        words = f"declined for {', '.join(unlisted)}, which the pack's closed list of reasons does not hold"
    elif worst is None or worst > KL_FLOOR:
        status, words = Status.FAIL, f"a declined step does not answer as stock does (worst KL {worst})"
    else:
        status = Status.PASS
        words = f"{len(steps)} steps declined ({', '.join(reasons)}), equal to stock"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _judge_poison(check: Check, samples: Samples) -> Outcome:
    clean, poisoned = median_kl(samples, "clean"), median_kl(samples, "poison")
    ran = sum(int(r["counted"] or 0) for r in arm_rows(samples, "launches", "poison") if r["op"] == check.op)
    limit = max(KL_FLOOR, check.number("clean_kl_margin") * (clean or 0.0))
    ran_poison = has_pair(samples, "poison")
    noticed = ran_poison and clean is not None and (poisoned is None or poisoned > limit)
    control = Control(
        kind="poison",
        description=f"{check.op} made wrong by a visible amount",
        failed=noticed and ran > 0,
        observed=f"median KL {show(poisoned)}, clean {show(clean)} (limit {limit:.3g}); {ran} launches",
    )
    figures = (
        figure("poison_kl", poisoned, "log-probabilities became non-finite"),
        figure("clean_kl", clean, "log-probabilities are not finite"),
        Figure(name="launches", value=ran),
    )
    if ran == 0:
        status = Status.NO_EVIDENCE
        words = f"{check.op} never ran in this model, so this eval says nothing about it"
    elif clean is None:
        status = Status.FAIL
        words = "the optimised path gives log-probabilities that are not finite without any poison"
    elif not noticed:
        status = Status.NO_EVIDENCE
        words = (
            f"poisoning {check.op} moved the median KL only to {show(poisoned)}: the eval does not cover it"
        )
    else:
        status = Status.PASS
        words = f"poisoning {check.op} moved the median KL from {show(clean)} to {show(poisoned)}"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _judge_transition(check: Check, samples: Samples) -> Outcome:
    always, switching, planted = (median_kl(samples, pair) for pair in ("always", "switching", "planted"))
    both = {
        str(row["path"])
        for row in step_rows(samples, "switching", decode_only=check.subject != "prefill_joins")
    }
    limit = max(KL_FLOOR, check.number("clean_kl_margin") * (always or 0.0))
    control = Control(
        kind="poison",
        description="the same switching with one optimised op made wrong",
        failed=has_pair(samples, "planted") and (planted is None or planted > limit),
        observed=f"median KL {show(planted)} (limit {limit:.3g})",
    )
    figures = (
        figure("switching_kl", switching, "log-probabilities are not finite"),
        figure("always_kl", always, "log-probabilities are not finite"),
    )
    if both != {"optimised", "stock"}:
        status = Status.NO_EVIDENCE
        words = f"the steps took only {', '.join(sorted(both)) or 'no path'}: nothing was switched"
    elif switching is None or always is None or switching > limit:
        status = Status.FAIL
        words = f"switching inside a request moves the median KL to {show(switching)}, over {limit:.3g}"
    else:
        status = Status.PASS
        words = f"median KL to stock {show(switching)} when switching, {show(always)} when not"
    return judged(check, samples, status, words, next_steps(check), control, figures)
