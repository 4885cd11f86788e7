"""Whether a second run of the same plan gives what the first gave. Pure: two bundles in, one answer out.

A check is replicated when both runs pass, or both fail, and every figure that has an interval in the first
meets it in the second. It is not replicated when one passes and the other fails, or a figure lies elsewhere.
Anything else says nothing: it did not run, was inconclusive, asks another question, or is a time from another
kind of machine.
"""

from collections.abc import Sequence

from harness.domain.check import Check, Figure, Outcome, StageName, Status
from harness.domain.machine import Machine
from harness.domain.plan import Plan
from harness.domain.replication import CheckReplication, FigurePair, Repeated, Replication
from harness.evidence.diff import diff_bundles
from harness.evidence.reader import Bundle
from harness.evidence.replanning import is_same_question

__all__ = ["compare_runs", "replicate_outcomes"]

TELLING = frozenset({Status.PASS, Status.FAIL})
NOISE = "noise_floor"
SELF_COMPARISON = "null_ratio"
"""Stock against stock: its interval is the noise itself."""


def compare_runs(first: Bundle, second: Bundle) -> Replication:
    """The answer for every check that the second run planned."""
    conditions = tuple(
        (d.about, d.first, d.second) for d in diff_bundles(first, second).conditions if d.about != "full"
    )
    checks = replicate_outcomes((first.plan, first.outcomes), (second.plan, second.outcomes))
    answers = {c.answer for c in checks}
    answer = next(
        (a for a in (Repeated.NOT_REPLICATED, Repeated.REPLICATED) if a in answers), Repeated.NOT_COMPARABLE
    )
    why = ""
    if answer is Repeated.NOT_COMPARABLE:
        why = checks[0].why if checks else "the runs have no check in common"
    return Replication(
        answer=answer,
        exit_code=answer.exit_code,
        first=first.digest,
        second=second.digest,
        conditions=conditions,
        checks=checks,
        why=why,
    )


def replicate_outcomes(
    first: tuple[Plan, Sequence[Outcome]], second: tuple[Plan, Sequence[Outcome]]
) -> tuple[CheckReplication, ...]:
    """Each check of the second plan against the first."""
    plan, again = first[0], second[0]
    asked = {c.id: c for c in plan.checks}
    ones, twos = ({o.check: o for o in outcomes} for _, outcomes in (first, second))
    found = []
    for check in again.checks:
        one, two = ones.get(check.id), twos.get(check.id)
        why = _incomparable(plan, again, asked.get(check.id), check) or _untelling(one, two)
        if why or one is None or two is None:
            found.append(_record(check, Repeated.NOT_COMPARABLE, one, two, (), why))
            continue
        figures = _figure_pairs(one, two)
        outside = [f for f in figures if not f.is_within]
        if one.status is not two.status:
            words = f"{one.status} in the bundle and {two.status} here: {two.summary}"
            found.append(_record(check, Repeated.NOT_REPLICATED, one, two, figures, words))
        elif outside and one.status is Status.PASS:
            words = "; ".join(
                f"{f.name} is {f.second:.4g} here, outside of {f.low:.4g} to {f.high:.4g}" for f in outside
            )
            found.append(_record(check, Repeated.NOT_REPLICATED, one, two, figures, words))
        else:
            found.append(_record(check, Repeated.REPLICATED, one, two, figures, ""))
    return tuple(found)


def _incomparable(plan: Plan, again: Plan, asked: Check | None, check: Check) -> str:
    """Why two outcomes of a check are about different things; empty where they are not."""
    if plan.pack_digest != again.pack_digest:
        return (
            f"the kernels here (pack digest {again.pack_digest[:12]}) are not those of the bundle "
            f"({plan.pack_digest[:12]})"
        )
    if asked is None:
        return "the bundle did not plan it"
    if not is_same_question(asked, check, plan.policy):
        return "it asks another question than in the bundle"
    if check.stage is StageName.SWEEP and not _is_same_kind(plan.machine, again.machine):
        return "times of another kind of machine"
    return ""


def _is_same_kind(one: Machine, two: Machine) -> bool:
    """Whether times may be put side by side: the same GPUs, or without any the same processor."""
    gpus = [[g.name for g in machine.gpus] for machine in (one, two)]
    return gpus[0] == gpus[1] and (bool(gpus[0]) or one.cpu_model == two.cpu_model)


def _untelling(one: Outcome | None, two: Outcome | None) -> str:
    for outcome, where in ((one, "in the bundle"), (two, "here")):
        if outcome is None:
            return f"it has no outcome {where}"
        if outcome.status not in TELLING:
            return f"{outcome.status} {where}: {outcome.summary}"
    return ""


def _figure_pairs(one: Outcome, two: Outcome) -> tuple[FigurePair, ...]:
    """Figures of the first run that have an interval, with the second run's."""
    others = {f.name: f for f in two.figures}
    noise = max(_value(o, NOISE) for o in (one, two))
    pairs = []
    for figure in one.figures:
        other = others.get(figure.name)
        if figure.name == SELF_COMPARISON or other is None:
            continue
        pair = _pair(figure, other, noise if figure.name == "ratio" else 0.0)
        if pair is not None:
            pairs.append(pair)
    return tuple(pairs)


def _pair(figure: Figure, other: Figure, noise: float) -> FigurePair | None:
    if figure.value is None or figure.low is None or figure.high is None or other.value is None:
        return None
    low, high = figure.low * (1 - noise), figure.high * (1 + noise)
    second_low = other.value if other.low is None else other.low
    second_high = other.value if other.high is None else other.high
    return FigurePair(
        name=figure.name,
        first=figure.value,
        low=low,
        high=high,
        second=other.value,
        second_low=other.low,
        second_high=other.high,
        is_within=second_low <= high and second_high >= low,
    )


def _value(outcome: Outcome, name: str) -> float:
    return next((float(f.value) for f in outcome.figures if f.name == name and f.value is not None), 0.0)


def _record(
    check: Check,
    answer: Repeated,
    one: Outcome | None,
    two: Outcome | None,
    figures: tuple[FigurePair, ...],
    why: str,
) -> CheckReplication:
    return CheckReplication(
        check=check.id,
        answer=answer,
        first=one.status if one else None,
        second=two.status if two else None,
        figures=figures,
        why=why,
    )
