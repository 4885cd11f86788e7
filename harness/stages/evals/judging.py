"""What the answers of an eval amount to.

Pure: samples in, outcome out; answers are scored here, by the harness's scorers.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean

from harness.domain.check import Check, Control, Figure, Finding, Outcome, Samples, Severity, Status, judged
from harness.domain.record import Scalar
from harness.domain.table_shape import unusable
from harness.measure.paired import Pairs, Verdict, compare_pairs
from harness.stages.evals.scorers import SCORER_IDS, score_tokens
from harness.stages.evals.tables import drift_faults, task_faults

__all__ = ["judge"]

Rows = Sequence[Mapping[str, Scalar]]
AGREEMENT_Z = 2.58
MAX_FLIPPED_SHOWN = 20
RIGHT = 1.0 - 1e-9
"""Score from which an answer counts as right in the paired comparison."""


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome of one eval."""
    if check.parameter("kind") == "drift":
        return _judge_drift(check, samples)
    return _judge_task(check, samples)


def _judge_drift(check: Check, samples: Samples) -> Outcome:
    if unfit := drift_faults(samples):
        return unusable(check, samples, unfit)
    rows = _rows(samples, "drift")
    by_arm = {arm: [r for r in rows if r["arm"] == arm] for arm in ("stock", "optimised", "poison")}
    words, is_bad = _drift_verdict(check, by_arm["stock"], by_arm["optimised"])
    poison_words, is_noticed = _drift_verdict(check, by_arm["stock"], by_arm["poison"])
    control = Control(
        kind="poison", description="the pack's first op made wrong on the optimised path",
        failed=is_noticed and bool(by_arm["poison"]),
        observed=poison_words,
    )  # fmt: skip
    share = _path_share(samples)
    figures = (
        _figure("path_share", share, "no token was decoded"),
        _figure("stock_mean_kl", _mean_kl(by_arm["stock"]), "not finite"),
        _figure("optimised_mean_kl", _mean_kl(by_arm["optimised"]), "not finite"),
        _figure("optimised_kl_slope_per_token", _slope(by_arm["optimised"]), "not finite"),
        _figure("top1_agreement", _top1(by_arm["optimised"]), "no position"),
        Figure(name="positions", value=len(by_arm["optimised"])),
    )
    if not by_arm["optimised"] or not by_arm["stock"]:
        return judged(
            check, samples, Status.NO_EVIDENCE, "no position was compared", NEXT_STEPS, control, figures
        )
    if (low := _low_share(check, share)) is not None:
        return judged(check, samples, Status.NO_EVIDENCE, low, NEXT_STEPS, control, figures)
    status = Status.FAIL if is_bad else Status.PASS
    return judged(check, samples, status, words, NEXT_STEPS, control, figures)


def _drift_verdict(check: Check, stock: Rows, arm: Rows) -> tuple[str, bool]:
    """(what was seen, whether it is too far from the oracle): mean, worst position, growth, agreement."""
    stock_mean, arm_mean = _mean_kl(stock), _mean_kl(arm)
    if arm_mean is None or stock_mean is None:
        return "log-probabilities are not finite", True
    floor = check.number("drift_floor_kl")
    limit = check.number("drift_factor") * stock_mean + floor
    worst_limit = check.number("drift_factor") * max(_kls(stock)) + floor
    if arm_mean > limit:
        return f"mean KL to the oracle {arm_mean:.3g}, over {limit:.3g} (stock {stock_mean:.3g})", True
    if max(_kls(arm)) > 4 * worst_limit:
        return f"worst KL to the oracle {max(_kls(arm)):.3g}, over {4 * worst_limit:.3g}", True
    slope, stock_slope = _slope(arm) or 0.0, _slope(stock) or 0.0
    slope_limit = check.number("drift_slope_factor") * abs(stock_slope) + limit / max(1, len(arm))
    if slope > slope_limit:
        return f"KL grows by {slope:.3g} a token, over {slope_limit:.3g} (stock {stock_slope:.3g})", True
    agreement, stock_agreement = _top1(arm) or 0.0, _top1(stock) or 0.0
    if agreement < check.number("min_top1_agreement") * stock_agreement - _agreement_noise(
        stock_agreement, len(arm)
    ):
        return f"top-1 agreement with the oracle {agreement:.1%} (stock {stock_agreement:.1%})", True
    words = f"mean KL to the oracle {arm_mean:.3g} against stock's {stock_mean:.3g} over {len(arm)} positions"
    return words, False


def _agreement_noise(agreement: float, positions: int) -> float:
    """What two samples of agreement over this many positions differ by in 199 of 200 cases (normal, one
    side).
    """
    share = min(max(agreement, 1.0 / positions), 1.0 - 1.0 / positions)
    return AGREEMENT_Z * sqrt(2.0 * share * (1.0 - share) / positions)


def _judge_task(check: Check, samples: Samples) -> Outcome:
    if unfit := task_faults(check, samples):
        return unusable(check, samples, unfit)
    rows = [_scored(check, row) for row in _rows(samples, "items")]
    stock = {str(r["item"]): r for r in rows if r["arm"] == "stock"}
    optimised = {str(r["item"]): r for r in rows if r["arm"] == "optimised"}
    poison = [r for r in rows if r["arm"] == "poison"]
    share = _path_share(samples)
    if not stock:
        return judged(check, samples, Status.NO_EVIDENCE, "no item was answered", NEXT_STEPS, None, ())
    pairs = _pairs(stock, optimised)
    found = compare_pairs(pairs, check.number("margin"), check.number("alpha"), check.number("power"))
    control = _poison_control(poison, stock)
    figures = (
        Figure(name="stock_score", value=_mean_score(stock.values())),
        Figure(name="optimised_score", value=_mean_score(optimised.values())),
        Figure(name="score_difference", value=found.difference, low=found.low, high=found.high),
        Figure(name="mcnemar_p", value=found.mcnemar_p),
        Figure(name="power_at_margin", value=found.power),
        Figure(name="items", value=pairs.n, note=f"scorer {SCORER_IDS[str(check.parameter('scorer'))]}"),
        _figure("path_share", share, "no token was decoded"),
    )
    findings = _flipped(stock, optimised)
    status, words = _task_verdict(check, stock, optimised, found.verdict, share)
    if words == "":
        words = (
            f"{_mean_score(optimised.values()):.3f} against stock's {_mean_score(stock.values()):.3f} on "
            f"{pairs.n} items; "
            f"difference at least {found.low:+.3f} (margin {check.number('margin')}), {found.items_needed} "
            "items settle it"
        )
    return judged(check, samples, status, words, NEXT_STEPS, control, figures, findings)


def _task_verdict(
    check: Check,
    stock: Mapping[str, Mapping[str, Scalar]],
    optimised: Mapping[str, Mapping[str, Scalar]],
    verdict: Verdict,
    share: float | None,
) -> tuple[Status, str]:
    """Status and, where it is not about the scores' difference, its words."""
    broken = [item for item, row in optimised.items() if row["finish"] == "error"]
    if broken:
        return Status.FAIL, f"{len(broken)} answers had no finite log-probability, first {broken[0]}"
    if (low := _low_share(check, share)) is not None:
        return Status.NO_EVIDENCE, low
    least = float(check.parameter("min_score") or 0.0)
    if _mean_score(stock.values()) < least:
        return Status.NO_EVIDENCE, f"stock itself scores {_mean_score(stock.values()):.3f}, under {least}"
    by_verdict = {
        Verdict.NOT_WORSE: Status.PASS,
        Verdict.WORSE: Status.FAIL,
        Verdict.OPEN: Status.INCONCLUSIVE,
    }
    return by_verdict[verdict], ""


def _poison_control(
    poison: Sequence[Mapping[str, Scalar]], stock: Mapping[str, Mapping[str, Scalar]]
) -> Control:
    right = [r for r in poison if float(r["score"] or 0) >= RIGHT]
    before = [r for r in poison if float(stock.get(str(r["item"]), {}).get("score") or 0) >= RIGHT]
    return Control(
        kind="poison",
        description="the pack's first op made wrong on the optimised path, on the first items",
        failed=len(right) < len(before),
        observed=f"{len(right)} of {len(poison)} right, {len(before)} with stock",
    )


def _scored(check: Check, row: Mapping[str, Scalar]) -> dict[str, Scalar]:
    answer, target = (tuple(int(t) for t in str(row[key]).split()) for key in ("answer", "target"))
    score = score_tokens(
        str(check.parameter("scorer")), answer, target, int(row["prefix_tokens"] or 0),
        int(check.parameter("tail_tokens") or 0),
    )  # fmt: skip
    return {**row, "score": score}


def _pairs(stock: Mapping[str, Mapping[str, Scalar]], optimised: Mapping[str, Mapping[str, Scalar]]) -> Pairs:
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for item, row in stock.items():
        key = (float(row["score"] or 0) >= RIGHT, float(optimised[item]["score"] or 0) >= RIGHT)
        counts[key] += 1
    return Pairs(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def _flipped(
    stock: Mapping[str, Mapping[str, Scalar]], optimised: Mapping[str, Mapping[str, Scalar]]
) -> tuple[Finding, ...]:
    """Items that stock has right and the optimised arm has not, with the first token that differs."""
    findings = []
    for item, row in stock.items():
        other = optimised[item]
        if float(row["score"] or 0) >= RIGHT > float(other["score"] or 0):
            a, b = str(row["answer"]).split(), str(other["answer"]).split()
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            message = (
                f"item {item} (context {row['context']}): right with stock, wrong here from token {at} on"
            )
            findings.append(Finding(rule="flipped_item", severity=Severity.WARNING, message=message))
    return tuple(findings[:MAX_FLIPPED_SHOWN])


def _mean_score(rows: object) -> float:
    return fmean(float(r["score"] or 0) for r in rows)  # type: ignore[attr-defined]  # an iterable of scored rows


def _path_share(samples: Samples) -> float | None:
    """Tokens that the optimised arm decoded on the optimised path over all that it decoded."""
    steps = [
        r for r in _rows(samples, "steps") if r["arm"] == "optimised" and r["phase"] in ("decode", "verify")
    ]
    total = sum(int(r["tokens"] or 0) for r in steps)
    return sum(int(r["tokens"] or 0) for r in steps if r["path"] == "optimised") / total if total else None


def _low_share(check: Check, share: float | None) -> str | None:
    least = check.number("min_path_share")
    if share is None or share < least:
        return f"only {share or 0:.1%} of the tokens came from the optimised path (least {least:.0%})"
    return None


def _kls(rows: Rows) -> list[float]:
    return [float(r["kl"]) for r in rows if r["kl"] is not None]


def _mean_kl(rows: Rows) -> float | None:
    kls = _kls(rows)
    return fmean(kls) if kls and len(kls) == len(rows) else None


def _top1(rows: Rows) -> float | None:
    return fmean(bool(r["is_top1_equal"]) for r in rows) if rows else None


def _slope(rows: Rows) -> float | None:
    """Least-squares slope of KL over position, nats a token."""
    points = [(float(r["position"] or 0), float(r["kl"])) for r in rows if r["kl"] is not None]
    if len(points) < 3 or len(points) != len(rows):
        return None
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None


def _rows(samples: Samples, name: str) -> Rows:
    table = samples.table(name)
    return () if table is None else table.records()


def _figure(name: str, value: float | None, missing: str) -> Figure:
    return Figure(name=name, value=value, missing=None if value is not None else missing)


NEXT_STEPS = {
    Status.FAIL: "find the op: `fasttrack kernels test`, then the poison matrix of the coverage stage",
    Status.NO_EVIDENCE: "make the optimised path run, or choose a model that solves the task",
    Status.INCONCLUSIVE: "run more items: `fasttrack run evals --full`",
}
