"""What the samples of a feature amount to. Pure: samples in, outcome out."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from harness.domain.check import Check, Control, Figure, Outcome, Samples, Status, judged
from harness.domain.record import Scalar
from harness.domain.table_shape import unusable
from harness.measure.goodness import Draw, stated_p
from harness.stages.evals.features import StructuredAnswer
from harness.stages.evals.ledger_tables import lacking_cells, steps_to_fill
from harness.stages.evals.shares import (
    NEXT_STEPS,
    figure_of,
    limit,
    low_share,
    own_kernels,
    path_share,
    rows_of,
)
from harness.stages.evals.tables import feature_faults

__all__ = ["judge_feature"]

CONTROLS = {
    "temperature_sampling": ("poison", "draws of an arm whose first op is wrong"),
    "structured_output": ("switch_off", "the same requests without the schema"),
    "stop_handling": ("switch_off", "the same requests without the stop text"),
    "full_context": ("planted", "the needle's text is turned round in the prompt"),
    "prefix_caching": ("planted", "the prompt's own cold run beside the run of another tail"),
    "batch_mates": ("planted", "a request's own run beside its neighbour's"),
}


MOVED_DRAWS = ("planted", "the arm's draws held to the probabilities of the place behind, or a poisoned arm")


def judge_feature(check: Check, samples: Samples) -> Outcome:
    """The outcome of one feature's check."""
    if unfit := feature_faults(samples):
        return unusable(check, samples, unfit)
    name = str(check.subject)
    if name == "temperature_sampling":
        status, words, seen, failed, figures = _judge_draws(check, samples)
    elif name in ("prefix_caching", "batch_mates"):
        status, words, seen, failed, figures = _judge_spreads(check, samples)
    else:
        status, words, seen, failed, figures = _judge_texts(check, samples)
    share = path_share(samples)
    figures = (*figures, figure_of("path_share", share, "no token was decoded"))
    if status is Status.PASS and (low := low_share(check, share)) is not None:
        status, words = Status.NO_EVIDENCE, low
    next_steps: Mapping[Status, str] = NEXT_STEPS
    if status is Status.PASS and (lacking := lacking_cells(check, samples)) is not None:
        status, words, next_steps = Status.NO_EVIDENCE, lacking, steps_to_fill(check)
    own = own_kernels(samples)
    if own is not None:
        figures = (
            *figures,
            Figure(name="own_kernels", value=len(own), note="of the optimised arm's profile"),
        )
        if status is Status.PASS and not own:
            status, words = (
                Status.NO_EVIDENCE,
                "the servers' profilers saw no kernel that stock does not launch",
            )
    kind, description = CONTROLS[name]
    if name == "temperature_sampling" and dict(check.parameters).get("engine") == "vllm":
        kind, description = MOVED_DRAWS
    control = Control.model_validate(
        {"kind": kind, "description": description, "failed": failed, "observed": seen}
    )
    return judged(check, samples, status, words, next_steps, control, figures)


_Judged = tuple[Status, str, str, bool, tuple[Figure, ...]]
"""Status, words, what the control showed, whether it failed as it should, figures."""


def _judge_draws(check: Check, samples: Samples) -> _Judged:
    rows = rows_of(samples, "draws")
    alarm = limit(check, "false_alarm", check.number("alpha"))
    seed = int(check.parameter("seed") or 0)
    by_arm = {arm: [r for r in rows if r["arm"] == arm] for arm in ("optimised", "poison")}
    if any(r["own"] is None for r in by_arm["optimised"]):
        return Status.FAIL, "a drawn token had no finite probability", "not looked at", False, ()
    least = int(check.parameter("items") or 0) * int(check.parameter("max_tokens") or 0) // 2
    drawn = [Draw(float(r["above"] or 0), float(r["own"] or 0)) for r in by_arm["optimised"]]
    if len(drawn) < max(1, least):
        return Status.NO_EVIDENCE, f"only {len(drawn)} tokens were drawn", "not looked at", False, ()
    p = stated_p(drawn, seed)
    spoiled = [
        Draw(float(r["above"] or 0), float(r["own"] or 0)) for r in by_arm["poison"] if r["own"] is not None
    ]
    poison_p = stated_p(spoiled, seed) if spoiled else 0.0
    words = f"{len(drawn)} drawn tokens follow the probabilities that stock states (p {p:.3g})"
    if p < alarm:
        words = (
            f"{len(drawn)} drawn tokens do not follow the probabilities that stock states (p {p:.3g}, "
            f"under {alarm:.3g})"
        )
    figures = (Figure(name="draws", value=len(drawn)), Figure(name="stated_p", value=p))
    status = Status.PASS if p >= alarm else Status.FAIL
    return status, words, f"p {poison_p:.3g} over {len(spoiled)} draws", poison_p < alarm, figures


def _judge_texts(check: Check, samples: Samples) -> _Judged:
    rows = rows_of(samples, "texts")
    wrong = {arm: [r for r in rows if r["arm"] == arm and not _is_right(check, r)] for arm in _ARMS}
    counts = {arm: sum(r["arm"] == arm for r in rows) for arm in _ARMS}
    asked = int(check.parameter("items") or 0)
    seen = f"{len(wrong['control'])} of {counts['control']} go wrong"
    failed = counts["control"] > 0 and len(wrong["control"]) == counts["control"]
    figures = tuple(
        Figure(name=f"{arm}_right", value=counts[arm] - len(wrong[arm]), note=f"of {counts[arm]}")
        for arm in ("stock", "optimised")
    )
    if counts["stock"] != asked or counts["optimised"] != asked:
        words = f"{counts['stock']} and {counts['optimised']} answers, and the plan asks {asked} of each arm"
        return Status.INVALID, words, seen, failed, figures
    if wrong["stock"]:
        words = f"stock itself gets {len(wrong['stock'])} of {asked} wrong, first {wrong['stock'][0]['item']}"
        return Status.NO_EVIDENCE, words, seen, failed, figures
    if wrong["optimised"]:
        first = wrong["optimised"][0]
        said = str(first["answer"])[:60]
        words = f"{len(wrong['optimised'])} of {asked} wrong, first {first['item']}: {said!r}"
        return Status.FAIL, words, seen, failed, figures
    return Status.PASS, f"all {asked} answers of both arms are as they must be", seen, failed, figures


def _is_right(check: Check, row: Mapping[str, Scalar]) -> bool:
    if check.subject != "structured_output":
        return row["answer"] == row["expected"] and row["finish"] == "stop"
    try:
        StructuredAnswer.model_validate_json(str(row["answer"]), strict=True)
    except ValidationError:
        return False
    return True


def _judge_spreads(check: Check, samples: Samples) -> _Judged:
    rows = rows_of(samples, "spreads")
    gaps: dict[str, list[float | None]] = {
        arm: [None if r["gap"] is None else float(r["gap"]) for r in rows if r["arm"] == arm] for arm in _ARMS
    }
    if not gaps["stock"] or not gaps["optimised"]:
        return Status.NO_EVIDENCE, "no position was compared", "nothing", False, ()
    worst = {arm: _worst(gaps[arm]) for arm in _ARMS}
    stock, own, planted = worst["stock"], worst["optimised"], worst["control"]
    allowed = limit(check, "spread_factor", 2.0) * (stock or 0.0) + limit(check, "spread_floor_nats", 0.05)
    figures = (
        figure_of("stock_spread_nats", stock, "not finite"),
        figure_of("optimised_spread_nats", own, "not finite"),
        Figure(name="positions", value=len(gaps["optimised"])),
    )
    failed = planted is None or planted > allowed
    seen = "answers part at once" if planted is None else f"{planted:.3g} nats, over {allowed:.3g}"
    hits = [int(r["value"] or 0) for r in rows_of(samples, "counters") if r["name"] == "prefix_hits"]
    if check.subject == "prefix_caching" and (len(hits) < 2 or not all(hits)):
        return Status.NO_EVIDENCE, "no prompt found its prefix in the cache", seen, failed, figures
    if stock is None:
        words = "stock's own answers part at once, so it has no spread to hold the optimised arm to"
        return Status.NO_EVIDENCE, words, seen, failed, figures
    if own is None or own > allowed:
        moved = "beyond what can be told" if own is None else f"by {own:.3g} nats"
        words = f"log-probabilities move {moved}, over {allowed:.3g} (stock's own {stock})"
        return Status.FAIL, words, seen, failed, figures
    words = f"log-probabilities move by {own:.3g} nats at most, and {allowed:.3g} is allowed"
    return Status.PASS, words, seen, failed, figures


def _worst(gaps: Sequence[float | None]) -> float | None:
    """Largest gap; None where one was not told."""
    told = [gap for gap in gaps if gap is not None]
    return max(told) if told and len(told) == len(gaps) else None


_ARMS = ("stock", "optimised", "control")
