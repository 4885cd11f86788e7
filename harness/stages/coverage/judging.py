"""What the witnesses of a coverage check amount to. Pure: samples in, outcome out.

A check of the path passes only when ledger, counters and manifest agree that the optimised path ran, and when
the same verdict over the switched-off run says that it did not.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from harness.domain.check import Check, Control, Figure, Finding, Outcome, Samples, Severity, Status, judged
from harness.domain.record import Scalar
from harness.domain.table_shape import misshapen, unusable
from harness.stages.coverage.tables import STATE_SHAPES, WITNESS_SHAPES

__all__ = ["judge"]

KL_FLOOR = 1e-9
"""Nats. Below this two fp32 softmaxes over a few hundred tokens cannot be told apart."""
Rows = Sequence[Mapping[str, Scalar]]


class _Witness(NamedTuple):
    """What one arm's witnesses say together."""

    status: Status
    words: str
    share: float | None


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome of one coverage check."""
    kind = str(check.parameter("kind"))
    if unfit := misshapen(samples, STATE_SHAPES if kind == "state" else WITNESS_SHAPES):
        return unusable(check, samples, unfit)
    judges: dict[str, Callable[[Check, Samples], Outcome]] = {
        "path": _judge_path,
        "decline": _judge_decline,
        "poison": _judge_poison,
        "transition": _judge_transition,
        "state": _judge_state,
    }
    return judges[kind](check, samples)


def _judge_path(check: Check, samples: Samples) -> Outcome:
    least = check.number("min_path_share")
    on, off = _witness(samples, "on", least), _witness(samples, "off", least)
    control = Control(
        kind="switch_off",
        description="the same work with the switch off",
        failed=off.status is not Status.PASS and bool(_arm(samples, "steps", "off")),
        observed=off.words,
    )
    figures = (
        _figure("path_share", on.share, "no token was decoded"),
        _figure("kernels_per_step", _launches_per_step(samples, "on"), "no optimised step ran"),
        _figure("worst_kl_to_stock", _worst(samples, "on"), "log-probabilities are not finite"),
    )
    status, words = on.status, on.words
    if status is Status.PASS and _worst(samples, "on") is None:
        status, words = Status.FAIL, "the optimised path gave log-probabilities that are not finite"
    return judged(check, samples, status, words, NEXT_STEPS, control, figures)


def _judge_decline(check: Check, samples: Samples) -> Outcome:
    steps = _steps(samples, "on", decode_only=check.subject != "prefill")
    taken = [row for row in steps if row["path"] == "optimised"]
    reasons = sorted({str(row["reason"]) for row in steps})
    launched = sum(int(row["counted"] or 0) for row in _arm(samples, "launches", "on"))
    worst = _worst(samples, "on")
    twin = _witness(samples, "twin", 1.0)
    control = Control(
        kind="twin",
        description="a step just inside the envelope",
        failed=twin.status is Status.PASS,
        observed=f"taken: {twin.words}",
    )
    figures = (
        Figure(name="declined_steps", value=len(steps) - len(taken), note=", ".join(reasons)),
        _figure("worst_kl_to_stock", worst, "log-probabilities are not finite"),
    )
    if not steps:
        return judged(
            check, samples, Status.NO_EVIDENCE, "the ledger holds no step", NEXT_STEPS, control, figures
        )
    if taken or launched:
        words = f"{len(taken)} of {len(steps)} steps took the optimised path ({launched} launches)"
        return judged(check, samples, Status.FAIL, words, NEXT_STEPS, control, figures)
    if worst is None or worst > KL_FLOOR:
        words = f"a declined step does not answer as stock does (worst KL {worst})"
        return judged(check, samples, Status.FAIL, words, NEXT_STEPS, control, figures)
    words = f"{len(steps)} steps declined ({', '.join(reasons)}), equal to stock"
    return judged(check, samples, Status.PASS, words, NEXT_STEPS, control, figures)


def _judge_poison(check: Check, samples: Samples) -> Outcome:
    clean, poisoned = _median(samples, "clean"), _median(samples, "poison")
    ran = sum(int(r["counted"] or 0) for r in _arm(samples, "launches", "poison") if r["op"] == check.op)
    limit = max(KL_FLOOR, check.number("clean_kl_margin") * (clean or 0.0))
    ran_poison = _has_pair(samples, "poison")
    noticed = ran_poison and clean is not None and (poisoned is None or poisoned > limit)
    control = Control(
        kind="poison",
        description=f"{check.op} made wrong by a visible amount",
        failed=noticed and ran > 0,
        observed=f"median KL {_show(poisoned)}, clean {_show(clean)} (limit {limit:.3g}); {ran} launches",
    )
    figures = (
        _figure("poison_kl", poisoned, "log-probabilities became non-finite"),
        _figure("clean_kl", clean, "log-probabilities are not finite"),
        Figure(name="launches", value=ran),
    )
    if ran == 0:
        words = f"{check.op} never ran in this model, so this eval says nothing about it"
        return judged(check, samples, Status.NO_EVIDENCE, words, NEXT_STEPS, control, figures)
    if clean is None:
        words = "the optimised path gives log-probabilities that are not finite without any poison"
        return judged(check, samples, Status.FAIL, words, NEXT_STEPS, control, figures)
    if not noticed:
        words = (
            f"poisoning {check.op} moved the median KL only to {_show(poisoned)}: the eval does not cover it"
        )
        return judged(check, samples, Status.NO_EVIDENCE, words, NEXT_STEPS, control, figures)
    words = f"poisoning {check.op} moved the median KL from {_show(clean)} to {_show(poisoned)}"
    return judged(check, samples, Status.PASS, words, NEXT_STEPS, control, figures)


def _judge_transition(check: Check, samples: Samples) -> Outcome:
    always, switching, planted = (_median(samples, pair) for pair in ("always", "switching", "planted"))
    both = {str(row["path"]) for row in _steps(samples, "switching", decode_only=True)}
    limit = max(KL_FLOOR, 4.0 * (always or 0.0))
    control = Control(
        kind="poison",
        description="the same switching with one optimised op made wrong",
        failed=_has_pair(samples, "planted") and (planted is None or planted > limit),
        observed=f"median KL {_show(planted)} (limit {limit:.3g})",
    )
    figures = (
        _figure("switching_kl", switching, "log-probabilities are not finite"),
        _figure("always_kl", always, "log-probabilities are not finite"),
    )
    if both != {"optimised", "stock"}:
        words = f"the steps took only {', '.join(sorted(both)) or 'no path'}: nothing was switched"
        return judged(check, samples, Status.NO_EVIDENCE, words, NEXT_STEPS, control, figures)
    if switching is None or always is None or switching > limit:
        words = f"switching inside a request moves the median KL to {_show(switching)}, over {limit:.3g}"
        return judged(check, samples, Status.FAIL, words, NEXT_STEPS, control, figures)
    words = f"median KL to stock {_show(switching)} when switching, {_show(always)} when not"
    return judged(check, samples, Status.PASS, words, NEXT_STEPS, control, figures)


def _judge_state(check: Check, samples: Samples) -> Outcome:
    writes = _arm(samples, "writes", "on")
    left = _arm(samples, "writes", "process")
    planted = _arm(samples, "writes", "planted")
    where = [str(row["what"]) for row in _arm(samples, "writes", "planted_where")]
    control = Control(
        kind="planted",
        description=f"one undeclared element of {', '.join(where)} changed between steps",
        failed=bool(planted) and {str(row["what"]) for row in planted} == set(where),
        observed=f"named: {', '.join(str(row['what']) for row in planted) or 'nothing'}",
    )
    watched = [str(row["what"]) for row in _arm(samples, "writes", "watched")]
    findings = tuple(
        Finding(
            rule="undeclared_write",
            severity=Severity.ERROR,
            message=f"{row['what']} changed outside the declared state, step {row['step']}",
            remedy="declare the state in the claim, or stop writing it",
        )
        for row in (*writes, *left)
    )
    words = f"{len(watched)} steps, {watched[0] if watched else 'nothing'}: {len(findings)} undeclared"
    status = Status.FAIL if findings else Status.PASS if watched else Status.NO_EVIDENCE
    figures = (Figure(name="undeclared_changes", value=len(findings)),)
    return judged(check, samples, status, words, NEXT_STEPS, control, figures, findings)


def _witness(samples: Samples, arm: str, least_share: float) -> _Witness:
    """Ledger share, then counters against the manifest."""
    steps = _steps(samples, arm, decode_only=True)
    tokens = sum(int(row["tokens"] or 0) for row in steps)
    optimised = sum(int(row["tokens"] or 0) for row in steps if row["path"] == "optimised")
    launches = _arm(samples, "launches", arm)
    wrong = [row for row in launches if row["counted"] != row["expected"]]
    counted = sum(int(row["counted"] or 0) for row in launches)
    if tokens == 0:
        return _Witness(Status.NO_EVIDENCE, "the ledger holds no decode step", None)
    share = optimised / tokens
    if wrong:
        row = wrong[0]
        words = f"the manifest says {row['expected']} launches of {row['op']}, counted {row['counted']}"
        return _Witness(Status.FAIL, words, share)
    if share < least_share or counted == 0:
        reasons = sorted({str(row["reason"]) for row in steps if row["path"] != "optimised"})
        words = (
            f"{share:.1%} of {tokens} tokens took the optimised path, {counted} launches"
            f"{' (declined: ' + ', '.join(reasons) + ')' if reasons else ''}"
        )
        return _Witness(Status.NO_EVIDENCE, words, share)
    return _Witness(
        Status.PASS,
        f"{share:.1%} of {tokens} tokens on the optimised path, {counted} launches as the manifest says",
        share,
    )


def _steps(samples: Samples, arm: str, *, decode_only: bool) -> Rows:
    rows = _arm(samples, "steps", arm)
    return [row for row in rows if row["phase"] in ("decode", "verify")] if decode_only else rows


def _arm(samples: Samples, table: str, arm: str) -> Rows:
    found = samples.table(table)
    return [] if found is None else [row for row in found.records() if row["arm"] == arm]


def _worst(samples: Samples, pair: str) -> float | None:
    """Largest KL of a pair of arms; None when any position is not finite or there is none."""
    found = samples.table("divergence")
    kls = [] if found is None else [row["kl"] for row in found.records() if row["pair"] == pair]
    if not kls or any(kl is None for kl in kls):
        return None
    return max(float(kl) for kl in kls if kl is not None)


def _has_pair(samples: Samples, pair: str) -> bool:
    """Whether a pair of arms was compared at all: a control without rows is no control."""
    found = samples.table("divergence")
    return found is not None and any(row["pair"] == pair for row in found.records())


def _median(samples: Samples, pair: str) -> float | None:
    """Median KL of a pair of arms; None when any position is not finite or there is none.

    The median, because two sound paths of a model with routed experts differ by whole nats at few positions
    where rounding turns a near tie of the router; an error of an op moves every position.
    """
    found = samples.table("divergence")
    kls = [] if found is None else [row["kl"] for row in found.records() if row["pair"] == pair]
    if not kls or any(kl is None for kl in kls):
        return None
    return median(float(kl) for kl in kls if kl is not None)


def _launches_per_step(samples: Samples, arm: str) -> float | None:
    steps = [row for row in _steps(samples, arm, decode_only=True) if row["path"] == "optimised"]
    if not steps:
        return None
    return sum(int(row["counted"] or 0) for row in _arm(samples, "launches", arm)) / len(steps)


def _figure(name: str, value: float | None, missing: str) -> Figure:
    return Figure(name=name, value=value, missing=None if value is not None else missing)


def _show(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


NEXT_STEPS = {
    Status.FAIL: "read this check's steps table in the report; the first row that disagrees names the step",
    Status.NO_EVIDENCE: "make the optimised path run here; the steps table holds the decline reasons",
}
