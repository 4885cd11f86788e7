"""What audited kernels cost, written down as the limits of later audits: a pack commits the file, so that a
new spill or a load that became narrow fails and says what grew.

A limit that is the same on all architectures is written once (`max_registers`), else for each
(`sm_90a.max_registers`). Spills are written only where the caller accepts them: a person who has looked.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.errors import InputError

__all__ = ["expectations", "merged", "render_expectations"]

REGISTER_UNIT = 8
"""A thread's registers are given out in eights: growth within one costs nothing."""
Limits = Mapping[str, int]


def expectations(
    checks: Iterable[Check], outcomes: Iterable[Outcome], *, accepts_spills: bool = False
) -> Mapping[str, Limits]:
    """By variant, limits named as a pack names them. Raises `InputError` where nothing was audited, or
    something did not pass for another reason than its old limits.
    """
    allowed = {"registers", "wide_loads", *(["spill"] if accepts_spills else [])}
    by_check = {o.check: o for o in outcomes}
    found: dict[str, dict[str, Limits]] = {}
    unfit = []
    for check in checks:
        if check.stage is not StageName.AUDIT or check.subject is None or check.cell is None:
            continue
        outcome = by_check.get(check.id)
        rules = {f.rule for f in outcome.findings if f.waived is None} if outcome else set()
        is_only_cost = bool(rules) and rules <= allowed
        if outcome is None or not (outcome.status is Status.PASS or is_only_cost):
            unfit.append(check.id)
            continue
        found.setdefault(check.subject, {})[check.cell.arch] = _limits(outcome)
    if unfit or not found:
        what = f"{len(unfit)} audits did not pass, first {unfit[0]}" if unfit else "it holds no audit"
        raise InputError(
            f"the bundle cannot say what kernels are expected to cost: {what}; run the audit first"
        )
    return {subject: _joined(limits) for subject, limits in found.items()}


def merged(
    old: Mapping[str, Limits], found: Mapping[str, Limits], checks: Iterable[Check], only: Sequence[str] = ()
) -> Mapping[str, Limits]:
    """What was found; of an audit of some variants (`only`, or no full set) also the limits of the others."""
    is_full = all(c.parameter("set") == "full" for c in checks if c.stage is StageName.AUDIT)
    return found if is_full and not only else {**old, **found}


def _limits(outcome: Outcome) -> Limits:
    figures = {f.name: f.value for f in outcome.figures if f.value is not None}
    limits = {"max_registers": -(-int(figures["registers"]) // REGISTER_UNIT) * REGISTER_UNIT}
    share = figures.get("load16_share")
    if share is not None:
        # The share is rounded to four places: only a whole one is known to the percent.
        limits["min_wide_loads_percent"] = int(100 * share - (share < 1) * 0.01)
    if figures.get("spill_bytes"):
        limits["spill_bytes"] = int(figures["spill_bytes"])
    return limits


def _joined(by_architecture: Mapping[str, Limits]) -> Limits:
    """Limits of all architectures in one mapping."""
    joined: dict[str, int] = {}
    for name in dict.fromkeys(name for limits in by_architecture.values() for name in limits):
        values = {a: limits[name] for a, limits in by_architecture.items() if name in limits}
        if len(values) == len(by_architecture) and len(set(values.values())) == 1:
            joined[name] = next(iter(values.values()))
        else:
            joined |= {f"{architecture}.{name}": value for architecture, value in values.items()}
    return joined


def render_expectations(found: Mapping[str, Mapping[str, int]]) -> str:
    """The file's text: one variant a line, sorted, so that a difference reads well."""
    lines = (f"{json.dumps(name)}: {json.dumps(dict(sorted(found[name].items())))}" for name in sorted(found))
    return "{\n" + ",\n".join(lines) + "\n}\n"
