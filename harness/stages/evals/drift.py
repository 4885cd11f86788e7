"""What teacher-forced log-probabilities say: how far an arm is from the float64 oracle, and whether that
grows.

Pure: samples in, outcome out.
"""

from math import sqrt
from statistics import fmean

from harness.domain.check import Check, Control, Figure, Outcome, Samples, Status, judged
from harness.domain.table_shape import unusable
from harness.stages.evals.ledger_tables import lacking_cells, steps_to_fill
from harness.stages.evals.shares import NEXT_STEPS, Rows, figure_of, low_share, path_share, rows_of
from harness.stages.evals.tables import drift_faults

__all__ = ["agreement_noise", "judge_drift"]

AGREEMENT_Z = 2.58


def judge_drift(check: Check, samples: Samples) -> Outcome:
    if unfit := drift_faults(samples):
        return unusable(check, samples, unfit)
    rows = rows_of(samples, "drift")
    by_arm = {arm: [r for r in rows if r["arm"] == arm] for arm in ("stock", "optimised", "poison")}
    words, is_bad = _drift_verdict(check, by_arm["stock"], by_arm["optimised"])
    poison_words, is_noticed = _drift_verdict(check, by_arm["stock"], by_arm["poison"])
    control = Control(
        kind="poison", description="the pack's first op made wrong on the optimised path",
        failed=is_noticed and bool(by_arm["poison"]),
        observed=poison_words,
    )  # fmt: skip
    share = path_share(samples)
    figures = (
        figure_of("path_share", share, "no token was decoded"),
        figure_of("stock_mean_kl", _mean_kl(by_arm["stock"]), "not finite"),
        figure_of("optimised_mean_kl", _mean_kl(by_arm["optimised"]), "not finite"),
        figure_of("optimised_kl_slope_per_token", _slope(by_arm["optimised"]), "not finite"),
        figure_of("top1_agreement", _top1(by_arm["optimised"]), "no position"),
        Figure(name="positions", value=len(by_arm["optimised"])),
        figure_of("arms_mean_kl", _mean_kl(rows_of(samples, "pair")), "not finite"),
        figure_of("arms_top1_agreement", _top1(rows_of(samples, "pair")), "no position"),
    )
    if not by_arm["optimised"] or not by_arm["stock"]:
        return judged(
            check, samples, Status.NO_EVIDENCE, "no position was compared", NEXT_STEPS, control, figures
        )
    if (low := low_share(check, share)) is not None:
        return judged(check, samples, Status.NO_EVIDENCE, low, NEXT_STEPS, control, figures)
    if (lacking := lacking_cells(check, samples)) is not None:
        steps = steps_to_fill(check)
        return judged(check, samples, Status.NO_EVIDENCE, lacking, steps, control, figures)
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
    if agreement < check.number("min_top1_agreement") * stock_agreement - agreement_noise(
        stock_agreement, len(arm)
    ):
        return f"top-1 agreement with the oracle {agreement:.1%} (stock {stock_agreement:.1%})", True
    words = f"mean KL to the oracle {arm_mean:.3g} against stock's {stock_mean:.3g} over {len(arm)} positions"
    return words, False


def agreement_noise(agreement: float, positions: int) -> float:
    """What two samples of agreement over this many positions differ by in 199 of 200 cases (normal, one
    side).
    """
    share = min(max(agreement, 1.0 / positions), 1.0 - 1.0 / positions)
    return AGREEMENT_Z * sqrt(2.0 * share * (1.0 - share) / positions)


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
