"""Outcomes of checks on the process, the ledger's cost, sums over ranks and full-width layers. Pure."""

from collections.abc import Sequence
from statistics import median

from harness.domain.check import (
    Check,
    Control,
    Figure,
    Finding,
    Outcome,
    Samples,
    Severity,
    Status,
    judged,
)
from harness.stages.coverage.next_steps import next_steps
from harness.stages.coverage.witnesses import (
    KL_FLOOR,
    Rows,
    arm_rows,
    figure,
    records,
    show,
    traced,
    worst_kl,
)

__all__ = ["judge_collective", "judge_layer", "judge_ledger", "judge_state"]

ROUNDED_ONCE = 0.51
"""Ulp: half of one, and what fp32 loses below it."""


def judge_state(check: Check, samples: Samples) -> Outcome:
    """Nothing but the declared state changed, and nothing is left after the switch was turned off."""
    writes = arm_rows(samples, "writes", "on")
    left = arm_rows(samples, "writes", "process")
    planted = {str(row["what"]) for row in arm_rows(samples, "writes", "planted")}
    where = {str(row["what"]) for row in arm_rows(samples, "writes", "planted_where")}
    off = worst_kl(samples, "off")
    launched, left_on = (
        sum(int(row["launches"] or 0) for row in arm_rows(samples, "after_off", arm))
        for arm in ("off", "left_on")
    )
    control = Control(
        kind="planted",
        description=f"changed between steps: {', '.join(sorted(where))}; and the switch left on",
        failed=bool(where) and planted == where and left_on > 0,
        observed=f"named: {', '.join(sorted(planted)) or 'nothing'}; left on: {left_on} launches",
    )
    watched = [str(row["what"]) for row in arm_rows(samples, "writes", "watched")]
    findings = [
        Finding(
            rule="undeclared_write",
            severity=Severity.ERROR,
            message=f"{row['what']} changed outside the declared state, step {row['step']}",
            remedy="declare the state in the claim, or stop writing it",
        )
        for row in (*writes, *left)
    ]
    if off is None or off > KL_FLOOR or launched:
        findings.append(
            Finding(
                rule="not_as_before",
                severity=Severity.ERROR,
                message=f"after the switch was turned off, stock is {show(off)} (worst KL) from a session in "
                f"which it was never on, and {launched} kernels of the path ran",
                remedy="leave nothing behind that stock reads",
            )
        )
    words = f"{len(watched)} steps, {watched[0] if watched else 'nothing'}: {len(findings)} undeclared"
    status = Status.FAIL if findings else Status.PASS if watched else Status.NO_EVIDENCE
    figures = (
        Figure(name="undeclared_changes", value=len(findings)),
        figure("kl_after_off", off, "log-probabilities are not finite"),
    )
    return judged(check, samples, status, words, next_steps(check), control, figures, tuple(findings))


def judge_ledger(check: Check, samples: Samples) -> Outcome:
    """Keeping a decision costs less than the allowed share of a decode step."""
    step, kept, planted = (_median_us(samples, what) for what in ("step", "ledger", "planted"))
    limit = check.number("max_ledger_share")
    share = kept / step if kept is not None and step else None
    planted_share = planted / step if planted is not None and step else None
    control = Control(
        kind="planted",
        description="a ledger that takes a tenth of a step",
        failed=planted_share is not None and planted_share > limit,
        observed=f"{0.0 if planted_share is None else planted_share:.1%} of a step",
    )
    figures = (
        figure("ledger_share", share, "nothing was timed"),
        figure("ledger_us", kept, "nothing was timed"),
        figure("step_us", step, "nothing was timed"),
    )
    if share is None or kept is None or step is None:
        status, words = Status.NO_EVIDENCE, "no decision or no step was timed"
    else:
        status = Status.PASS if share <= limit else Status.FAIL
        words = f"{kept:.1f} us a decision, {share:.2%} of a decode step of {step:.0f} us (limit {limit:.0%})"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def judge_collective(check: Check, samples: Samples) -> Outcome:
    """Every rank's part is in the sum once, rounded once, and all ranks hold the same."""
    worst, unlike = _worst_sum(arm_rows(samples, "sums", "on"))
    planted, _ = _worst_sum(arm_rows(samples, "sums", "planted"))
    control = Control(
        kind="planted",
        description="a sum that rounds after every rank, or leaves one out",
        failed=planted is not None and planted > ROUNDED_ONCE,
        observed=f"{show(planted)} ulp from the exact sum (limit {ROUNDED_ONCE})",
    )
    figures = (figure("worst_ulp", worst, "no sum was taken"),)
    if worst is None:
        status, words = Status.NO_EVIDENCE, "no sum over ranks was taken"
    elif unlike:
        status, words = Status.FAIL, f"ranks hold unlike sums: {', '.join(unlike)}"
    elif worst > ROUNDED_ONCE:
        status, words = Status.FAIL, f"a sum over ranks is {worst:.3g} ulp from the exact one"
    else:
        status, words = Status.PASS, f"sums are within {worst:.3g} ulp of the exact ones, alike on all ranks"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def judge_layer(check: Check, samples: Samples) -> Outcome:
    """Inside a graph replay of full-width layers the declared kernels ran and no others; stock ran none."""
    layers = int(check.parameter("layers") or 0)
    off = [k for k in arm_rows(samples, "kernels", "off") if k["op"] and k["seen"]]
    others = sum(int(k["seen"] or 0) for k in arm_rows(samples, "kernels", "off") if not k["op"])
    control = Control(
        kind="switch_off",
        description="stock's way over the same layers",
        failed=not off and others > 0,
        observed=f"{sum(int(k['seen'] or 0) for k in off)} kernels of the path, {others} others",
    )
    figures = tuple(
        figure(f"{arm}_kernels_per_layer", _kernels_per_layer(samples, label, layers), "nothing was traced")
        for arm, label in (("optimised", "on"), ("stock", "off"))
    )
    if not arm_rows(samples, "traces", "on"):
        status, words = Status.NO_EVIDENCE, "nothing was traced"
    else:
        status, words = traced(samples, "on")
    ran = {str(row["path"]) for row in records(samples, "layer_steps")}
    if status is Status.PASS and ran != {"optimised"}:
        status = Status.FAIL
        words = "the kernels' own counters do not show every op of the path, or something else ran beside it"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _kernels_per_layer(samples: Samples, arm: str, layers: int) -> float | None:
    kernels = arm_rows(samples, "kernels", arm)
    steps = {k["step"] for k in kernels}
    if not steps or not layers:
        return None
    return sum(int(k["seen"] or 0) for k in kernels) / len(steps) / layers


def _worst_sum(rows: Rows) -> tuple[float | None, list[str]]:
    """(largest distance, cases in which a rank's sum is another's)."""
    distances = [float(row["worst_ulp"] or 0.0) for row in rows]
    unlike = sorted({str(row["case"]) for row in rows if not row["is_alike"]})
    return (max(distances) if distances else None), unlike


def _median_us(samples: Samples, what: str) -> float | None:
    times: Sequence[float] = [
        float(row["us"] or 0.0) for row in records(samples, "costs") if row["what"] == what
    ]
    return median(times) if times else None
