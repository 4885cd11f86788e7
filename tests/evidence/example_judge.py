"""A judge for the example run: small, pure, and different for each stage, as the real ones are."""

from statistics import fmean, median

from harness.domain.check import (
    Check,
    Control,
    Figure,
    Outcome,
    Samples,
    Severity,
    StageName,
    Status,
)

__all__ = ["judge"]

NEXT = "read the samples of this check, mend what they show, and run the stage again"


def judge(check: Check, samples: Samples) -> Outcome:
    """Outcome of one example check."""
    if samples.ended != "ran":
        return _outcome(
            check, samples, Status.FAIL, f"the candidate {samples.ended}: {samples.detail}", None, ()
        )
    by_stage = {
        StageName.ISOLATION: _isolation,
        StageName.AUDIT: _audit,
        StageName.KERNELS: _kernels,
        StageName.COVERAGE: _coverage,
        StageName.EVALS: _evals,
        StageName.SWEEP: _sweep,
    }
    return by_stage[check.stage](check, samples)


def _isolation(check: Check, samples: Samples) -> Outcome:
    errors = [f for f in samples.findings if f.severity is Severity.ERROR and f.waived is None]
    files = _column(samples, "files", "path")
    control = Control(
        kind="planted",
        description="a violation of the rule planted in a copy of the diff",
        failed=bool(_column(samples, "control", "noticed")[0]),
        observed="1 finding at the planted line",
    )
    words = f"{len(errors)} violations in {len(files)} files"
    figures = (Figure(name="files_read", value=len(files)), Figure(name="violations", value=len(errors)))
    return _outcome(check, samples, Status.FAIL if errors else Status.PASS, words, control, figures)


def _audit(check: Check, samples: Samples) -> Outcome:
    spills = sum(_numbers(samples, "kernels", "spill_bytes"))
    registers = max(_numbers(samples, "kernels", "registers"))
    control = Control(
        kind="planted",
        description="an activation load planted above the wait",
        failed=True,
        observed="1 finding in the planted kernel",
    )
    figures = (
        Figure(name="registers", value=registers),
        Figure(name="spill_bytes", value=spills),
        Figure(name="shared_bytes", value=max(_numbers(samples, "kernels", "shared_bytes"))),
        Figure(name="instructions", value=sum(_numbers(samples, "kernels", "instructions"))),
    )
    words = f"{registers:.0f} registers, {spills:.0f} B spilled"
    return _outcome(check, samples, Status.FAIL if spills else Status.PASS, words, control, figures)


def _kernels(check: Check, samples: Samples) -> Outcome:
    optimised = max(_numbers(samples, "errors", "optimised_relative_l2"))
    stock = max(_numbers(samples, "errors", "stock_relative_l2"))
    bound = max(_numbers(samples, "errors", "bound"))
    poisoned = max(_numbers(samples, "errors", "poisoned_relative_l2"))
    control = Control(
        kind="poison",
        description="output multiplied by 1.05",
        failed=poisoned > bound,
        observed=f"relative L2 {poisoned:.3g} against a bound of {bound:.3g}",
    )
    figures = (
        Figure(name="optimised_relative_l2", value=optimised),
        Figure(name="stock_relative_l2", value=stock),
        Figure(name="worst_bound_share", value=optimised / bound),
        Figure(name="inputs", value=len(_numbers(samples, "errors", "bound"))),
    )
    words = f"relative L2 {optimised:.3g}, stock {stock:.3g}, bound {bound:.3g}"
    return _outcome(
        check, samples, Status.PASS if optimised <= bound else Status.FAIL, words, control, figures
    )


def _coverage(check: Check, samples: Samples) -> Outcome:
    kind = str(check.parameter("kind"))
    kl = _numbers(samples, "divergence", "kl")
    if kind == "poison":
        clean, poisoned = kl
        control = Control(
            kind="poison",
            description=f"{check.op} made wrong by a visible amount",
            failed=poisoned > 20 * clean,
            observed=f"worst KL {poisoned:.3g} against {clean:.3g} clean",
        )
        figures = (Figure(name="poison_kl", value=poisoned), Figure(name="clean_kl", value=clean))
        status = Status.PASS if control.failed else Status.NO_EVIDENCE
        words = f"poisoning {check.op} moved the worst KL from {clean:.3g} to {poisoned:.3g}"
        return _outcome(check, samples, status, words, control, figures)
    taken = _column(samples, "steps", "path")
    share = sum(p == "optimised" for p in taken) / len(taken)
    if kind == "decline":
        reasons = sorted({str(r) for r in _column(samples, "steps", "reason")})
        control = Control(
            kind="twin", description="a step just inside the envelope", failed=True, observed="taken"
        )
        figures = (
            Figure(name="declined_steps", value=len(taken), note=", ".join(reasons)),
            Figure(name="worst_kl_to_stock", value=max(kl)),
        )
        words = f"{len(taken)} steps declined ({', '.join(reasons)}), equal to stock"
        return _outcome(check, samples, Status.PASS if share == 0 else Status.FAIL, words, control, figures)
    control = Control(
        kind="switch_off",
        description="the same work with the switch off",
        failed=True,
        observed="0.0% of 48 tokens took the optimised path, 0 launches",
    )
    figures = (
        Figure(name="path_share", value=share),
        Figure(name="kernels_per_step", value=13),
        Figure(name="worst_kl_to_stock", value=max(kl)),
    )
    words = f"{share:.1%} of {len(taken)} tokens on the optimised path"
    status = Status.PASS if share >= check.number("min_path_share") else Status.NO_EVIDENCE
    return _outcome(check, samples, status, words, control, figures)


def _evals(check: Check, samples: Samples) -> Outcome:
    stock, optimised = (
        _numbers(samples, "items", "stock_score"),
        _numbers(samples, "items", "optimised_score"),
    )
    loss = fmean(stock) - fmean(optimised)
    margin = check.number("margin")
    control = Control(
        kind="poison",
        description="the pack's first op made wrong on the optimised path",
        failed=True,
        observed="1 of 8 right, 8 with stock",
    )
    figures = (
        Figure(name="stock_score", value=fmean(stock)),
        Figure(name="optimised_score", value=fmean(optimised)),
        Figure(name="score_difference", value=-loss, low=-loss - 0.02, high=-loss + 0.02),
        Figure(name="mcnemar_p", value=None, missing="no item flipped")
        if loss == 0
        else Figure(name="mcnemar_p", value=0.5),
        Figure(name="items", value=len(stock), note="scorer canary-prefix-1"),
        Figure(name="path_share", value=1.0),
    )
    words = (
        f"{fmean(optimised):.3f} against stock's {fmean(stock):.3f} on {len(stock)} items (margin {margin})"
    )
    status = Status.INCONCLUSIVE if loss > margin / 2 else Status.PASS
    return _outcome(check, samples, status, words, control, figures)


def _sweep(check: Check, samples: Samples) -> Outcome:
    table = samples.table("timings")
    rows = table.records() if table is not None else ()
    stock, optimised = (
        median(float(r["us"] or 0) for r in rows if r["arm"] == arm) for arm in ("stock", "optimised")
    )
    ratio = stock / optimised
    batch = check.cell.batch if check.cell is not None else 1
    control = Control(
        kind="planted",
        description="stock with 60% of its time added, against stock",
        failed=True,
        observed=f"0.62x [0.60, 0.65], stock {stock:.0f} us",
    )
    figures = (
        Figure(
            name="verify_steps_per_s",
            value=1e6 / optimised,
            note="optimised arm, no drafts: one token a step",
        ),
        Figure(name="tokens_per_s", value=batch * 1e6 / optimised, note="acceptance: none, no speculation"),
        Figure(name="stock_us", value=stock),
        Figure(name="optimised_us", value=optimised),
        Figure(
            name="ratio",
            value=ratio,
            low=ratio * 0.97,
            high=ratio * 1.03,
            note="stock time over optimised time",
        ),
        Figure(name="null_ratio", value=1.004, low=0.98, high=1.02, note="stock against stock"),
        Figure(name="noise_floor", value=0.02),
        Figure(name="path_share", value=1.0),
    )
    words = f"stock {stock:.0f} us, optimised {optimised:.0f} us: {ratio:.2f}x, asked 1.00x"
    return _outcome(check, samples, Status.PASS if ratio >= 0.98 else Status.FAIL, words, control, figures)


def _outcome(
    check: Check,
    samples: Samples,
    status: Status,
    summary: str,
    control: Control | None,
    figures: tuple[Figure, ...],
) -> Outcome:
    if status is Status.PASS and (control is None or not control.failed):
        status, summary = Status.NO_EVIDENCE, f"{summary}; but the control did not fail"
    return Outcome(
        check=check.id,
        status=status,
        tier=samples.tier,
        summary=summary,
        next_step="" if status is Status.PASS else NEXT,
        control=control,
        figures=figures,
        findings=samples.findings,
    )


def _column(samples: Samples, table: str, column: str) -> list[object]:
    found = samples.table(table)
    return [] if found is None else [row[column] for row in found.records()]


def _numbers(samples: Samples, table: str, column: str) -> list[float]:
    return [float(str(value)) for value in _column(samples, table, column)]
