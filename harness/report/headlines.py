"""The few numbers that people will repeat, each with what must be repeated with it."""

from collections.abc import Callable

from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.machine import Machine
from harness.evidence.reader import Bundle
from harness.report.panels.kernels import errors_of
from harness.report.panels.material import cell_name, figure, value
from harness.report.text import anchor, compact, number, plain
from harness.report.view import Headline

__all__ = ["headlines"]

Pairs = list[tuple[Check, Outcome]]


def headlines(bundle: Bundle) -> tuple[Headline, ...]:
    """Speed at the smallest cell, the worst cell, the worst kernel error, path share, the worst eval."""
    outcomes = {o.check: o for o in bundle.outcomes}
    machine = bundle.manifest.machine if bundle.manifest else bundle.plan.machine
    makers: list[tuple[StageName, Callable[[Pairs, Machine], list[Headline]]]] = [
        (StageName.SWEEP, _speed),
        (StageName.KERNELS, _error),
        (StageName.COVERAGE, _share),
        (StageName.EVALS, _eval),
    ]
    found = []
    for stage, make in makers:
        pairs = [(c, outcomes[c.id]) for c in bundle.plan.of_stage(stage) if c.id in outcomes]
        found += make(pairs, machine)
    return tuple(found)


def _speed(pairs: Pairs, machine: Machine) -> list[Headline]:
    timed = [(c, o) for c, o in pairs if value(o, "ratio") is not None and c.cell is not None]
    if not timed:
        return []
    first = min(timed, key=lambda p: (p[0].cell.batch, p[0].cell.context) if p[0].cell else (0, 0))
    worst = min(timed, key=lambda p: value(p[1], "ratio") or 0.0)
    found = []
    steps = figure(first[1], "verify_steps_per_s")
    if steps is not None and steps.value is not None:
        found.append(
            _headline(
                "verify steps per second, smallest cell", f"{steps.value:,.0f}", "", first,
                [_where(machine), plain(steps.note, 120), f"{_ratio(first[1])} stock"],
            )
        )  # fmt: skip
    ratio = figure(worst[1], "ratio")
    if ratio is not None and ratio.value is not None:
        interval = ""
        if ratio.low is not None and ratio.high is not None:
            interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
        noise = value(worst[1], "noise_floor")
        conditions = [_where(machine), f"noise floor {noise:.1%}" if noise is not None else ""]
        found.append(_headline("slowest cell, against stock", _ratio(worst[1]), interval, worst, conditions))
    return found


def _error(pairs: Pairs, machine: Machine) -> list[Headline]:
    measured = [(c, o, e) for c, o in pairs if (e := errors_of(o)) is not None]
    if not measured:
        return []
    check, outcome, errors = max(measured, key=lambda p: p[2].bound_share)
    conditions = [
        f"{plain(check.op or '', 60)}: {compact(errors.optimised)}, stock {compact(errors.stock)}",
        "relative L2 against float64",
    ]
    share = f"{errors.bound_share:.0%}"
    return [_headline("of its error bound, worst kernel", share, "", (check, outcome), conditions)]


def _share(pairs: Pairs, machine: Machine) -> list[Headline]:
    measured = [(c, o) for c, o in pairs if value(o, "path_share") is not None]
    if not measured:
        return []
    worst = min(measured, key=lambda p: value(p[1], "path_share") or 0.0)
    share = number("path_share", value(worst[1], "path_share") or 0.0)
    conditions = [f"lowest of {len(measured)} cells", "by ledger, launch counters and manifest"]
    return [_headline("of tokens on the optimised path", share, "", worst, conditions)]


def _eval(pairs: Pairs, machine: Machine) -> list[Headline]:
    scored = [(c, o) for c, o in pairs if value(o, "score_difference") is not None]
    if not scored:
        return []
    worst = min(scored, key=lambda p: value(p[1], "score_difference") or 0.0)
    found = figure(worst[1], "score_difference")
    difference = (value(worst[1], "score_difference") or 0.0) * 100
    interval = ""
    if found is not None and found.low is not None and found.high is not None:
        interval = f"{found.low * 100:+.1f} to {found.high * 100:+.1f}"
    items = value(worst[1], "items")
    conditions = [
        plain(worst[0].subject or "", 60),
        f"{items:.0f} items, the same in both arms" if items is not None else "",
    ]
    return [_headline("points, worst eval against stock", f"{difference:+.1f}", interval, worst, conditions)]


def _headline(
    label: str, text: str, interval: str, pair: tuple[Check, Outcome], conditions: list[str]
) -> Headline:
    check, outcome = pair
    words = [cell_name(check), *conditions, f"tier {outcome.tier.value}"]
    if outcome.status is not Status.PASS:
        words.append(outcome.status.value)
    return Headline(
        label=label,
        value=text,
        interval=interval,
        conditions=" · ".join(w for w in words if w),
        status=outcome.status.value,
        link=f"#{anchor(check.id)}",
    )


def _ratio(outcome: Outcome) -> str:
    return number("ratio", value(outcome, "ratio") or 0.0)


def _where(machine: Machine) -> str:
    gpus = [g.name for g in machine.gpus]
    return plain(
        f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.cpu_model}, {machine.cpu_count} cores", 120
    )
