"""What audited kernels cost, written down as the limits of later audits: a pack commits the file, so that a
new spill or a load that became narrow fails and says what grew.
"""

import json
from collections.abc import Iterable, Mapping

from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.errors import InputError

__all__ = ["expectations", "render_expectations"]

REGISTER_UNIT = 8
"""A thread's registers are given out in eights: growth within one costs nothing."""


def expectations(checks: Iterable[Check], outcomes: Iterable[Outcome]) -> Mapping[str, Mapping[str, int]]:
    """By variant, limits named as a pack names them (`sm_90a.max_registers`). Raises `InputError` where
    nothing was audited, or something did not pass for another reason than its old limits.
    """
    by_check = {o.check: o for o in outcomes}
    found: dict[str, dict[str, int]] = {}
    unfit = []
    for check in checks:
        outcome = by_check.get(check.id)
        if check.stage is not StageName.AUDIT or check.subject is None or check.cell is None:
            continue
        rules = {f.rule for f in outcome.findings if f.waived is None} if outcome else set()
        is_only_cost = bool(rules) and rules <= {"registers", "wide_loads"}
        if outcome is None or not (outcome.status is Status.PASS or is_only_cost):
            unfit.append(check.id)
            continue
        figures = {f.name: f.value for f in outcome.figures if f.value is not None}
        registers, share = int(figures["registers"]), figures.get("load16_share")
        limits = found.setdefault(check.subject, {})
        limits[f"{check.cell.arch}.max_registers"] = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
        if share is not None:
            # The share is rounded to four places: only a whole one is known to the percent.
            limits[f"{check.cell.arch}.min_wide_loads_percent"] = int(100 * share - (share < 1) * 0.01)
    if unfit or not found:
        what = f"{len(unfit)} audits did not pass, first {unfit[0]}" if unfit else "it holds no audit"
        raise InputError(
            f"the bundle cannot say what kernels are expected to cost: {what}; run the audit first"
        )
    return found


def render_expectations(found: Mapping[str, Mapping[str, int]]) -> str:
    """The file's text: one variant a line, sorted, so that a difference reads well."""
    lines = (f"{json.dumps(name)}: {json.dumps(dict(sorted(found[name].items())))}" for name in sorted(found))
    return "{\n" + ",\n".join(lines) + "\n}\n"
