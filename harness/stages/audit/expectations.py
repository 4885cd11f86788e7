"""What audited kernels cost, written down as the limits of later audits: a pack commits the file, so that a
new spill or a load that became narrow fails and says what grew.

A limit that is the same on all architectures of a kernel is written once (`max_registers`), else for each
(`sm_90a.max_registers`). Spills are written only where the caller accepts them, and so is a limit that is
looser than it was, with a reason, which the file keeps (`limits.ACCEPTED`): a person who has looked.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.domain.check import Check, Outcome, Severity, StageName, Status
from harness.domain.errors import InputError
from harness.stages.audit.limits import ACCEPTED, loosened

__all__ = ["accepted", "expectations", "merged", "render_expectations"]

MAX_SHOWN = 8
REGISTER_UNIT = 8
"""A thread's registers are given out in eights: growth within one costs nothing."""
Limits = Mapping[str, int]


def expectations(
    checks: Iterable[Check], outcomes: Iterable[Outcome], *, accepts_spills: bool = False
) -> Mapping[str, Limits]:
    """By variant, limits named as a pack names them. Raises `InputError` where nothing was audited, or
    something did not pass for another reason than its old limits.
    """
    allowed = {"registers", "wide_loads", "limit_loosened", *(["spill"] if accepts_spills else [])}
    by_check = {o.check: o for o in outcomes}
    found: dict[str, dict[str, Limits]] = {}
    everywhere: dict[str, frozenset[str]] = {}
    unfit = []
    for check in checks:
        if check.stage is not StageName.AUDIT or check.subject is None or check.cell is None:
            continue
        outcome = by_check.get(check.id)
        errors = [f for f in outcome.findings if f.severity is Severity.ERROR] if outcome else []
        rules = {f.rule for f in errors if f.waived is None}
        is_only_cost = bool(rules) and rules <= allowed
        if outcome is None or not (outcome.status is Status.PASS or is_only_cost):
            unfit.append(check.id)
            continue
        found.setdefault(check.subject, {})[check.cell.arch] = _limits(outcome)
        said = dict(check.parameters).get("architectures")  # plans of earlier versions do not say
        everywhere[check.subject] = frozenset(str(said or "?").split())
    if unfit or not found:
        what = f"{len(unfit)} audits did not pass, first {unfit[0]}" if unfit else "it holds no audit"
        raise InputError(
            f"the bundle cannot say what kernels are expected to cost: {what}; run the audit first"
        )
    return {subject: _joined(limits, everywhere[subject]) for subject, limits in found.items()}


def merged(
    old: Mapping[str, Limits], found: Mapping[str, Limits], checks: Iterable[Check], only: Sequence[str] = ()
) -> Mapping[str, Limits]:
    """What was found; of an audit of some variants (`only`, or no full set) also the limits of the others,
    and of variants that were audited on some architectures those on the others.
    """
    planned = [c for c in checks if c.stage is StageName.AUDIT]
    if all(c.parameter("set") == "full" for c in planned) and not only:
        return found
    seen: dict[str, set[str]] = {}
    for check in planned:
        if check.subject is not None and check.cell is not None:
            seen.setdefault(check.subject, set()).add(check.cell.arch)
    kept = {name: _beside(old.get(name, {}), own, seen.get(name, set())) for name, own in found.items()}
    return {**old, **kept}


def accepted(
    old: Mapping[str, Any], written: Mapping[str, Limits], reason: str | None
) -> Mapping[str, Mapping[str, tuple[int, int | None, str]]]:
    """Every limit that is looser than in the old file, as [old, new, reason], and those that the old file
    accepted and that still stand. Raises `InputError` for a looser limit without a reason.
    """
    earlier: Mapping[str, Mapping[str, Sequence[Any]]] = old.get(ACCEPTED, {})
    found: dict[str, dict[str, tuple[int, int | None, str]]] = {}
    refused = []
    for name, limits in written.items():
        known = earlier.get(name, {})
        for limit, (before, after, why) in known.items():
            if after == limits.get(limit, limits.get(limit.split(".", 1)[-1])):
                found.setdefault(name, {})[limit] = (before, after, why)
        for limit, before, after in loosened(old[name], limits) if name in old else ():
            if reason is None:
                refused.append(f"{name}: {limit} {before} -> {'none' if after is None else after}")
                continue
            first = known[limit][0] if limit in known and known[limit][1] == before else before
            found.setdefault(name, {})[limit] = (first, after, reason)
    if refused:
        shown = "; ".join(refused[:MAX_SHOWN]) + (
            f" and {len(refused) - MAX_SHOWN} more" if len(refused) > MAX_SHOWN else ""
        )
        raise InputError(
            f"{len(refused)} limits would be looser than they are: {shown}; mend the kernels, or accept that "
            "with --accept-looser and a reason, which stays in the file and in every report on the change"
        )
    return found


def _beside(old: Limits, own: Limits, seen: set[str]) -> Limits:
    """One variant's limits of an audit on some architectures, and its older ones for others."""
    if not any("." in name for name in own):
        return own
    general = {n: v for n, v in old.items() if "." not in n and not any(o.endswith(f".{n}") for o in own)}
    others = {n: v for n, v in old.items() if "." in n and n.split(".", 1)[0] not in seen}
    return {**general, **others, **own}


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


def _joined(by_architecture: Mapping[str, Limits], everywhere: frozenset[str]) -> Limits:
    """Limits of the audited architectures in one mapping; named without one only where they hold for all that
    the variant is compiled for.
    """
    joined: dict[str, int] = {}
    for name in dict.fromkeys(name for limits in by_architecture.values() for name in limits):
        values = {a: limits[name] for a, limits in by_architecture.items() if name in limits}
        if values.keys() == everywhere and len(set(values.values())) == 1:
            joined[name] = next(iter(values.values()))
        else:
            joined |= {f"{architecture}.{name}": value for architecture, value in values.items()}
    return joined


def render_expectations(
    found: Mapping[str, Limits], looser: Mapping[str, Mapping[str, tuple[int, int | None, str]]] | None = None
) -> str:
    """The file's text: one variant a line, sorted, so that a difference reads well; `looser`: what was
    accepted.
    """
    if looser:
        looser = {name: dict(sorted(looser[name].items())) for name in sorted(looser)}
        found = {**found, ACCEPTED: looser}  # type: ignore[dict-item]  # its own shape, under its own key
    lines = (f"{json.dumps(name)}: {json.dumps(dict(sorted(found[name].items())))}" for name in sorted(found))
    return "{\n" + ",\n".join(lines) + "\n}\n"
