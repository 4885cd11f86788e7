"""From an op's rows to an outcome: pure, so that anyone can judge a bundle's samples again.

A token passes when the candidate's error is at most `factor` times stock's plus `floor_ulp` units in the last
place at the row's scale, both in relative L2 (never above `hard_cap`) and in its worst element; the same
holds for healthy requests beside a poisoned one. Samples that
leave out what was planted, repeated or launched are INVALID. The control comes first: every spoiled result
must have been noticed, by the same rule.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.domain.check import Check, Control, Figure, Finding, Outcome, Samples, Severity, Status
from harness.domain.table_shape import misshapen, unusable
from harness.stages.kernels.collectives import IMPLEMENTATION, judge_collective
from harness.stages.kernels.growth import GROWTH, judge_growth
from harness.stages.kernels.tables import GUARD_SHAPES, faults

__all__ = ["bound_share", "judge"]

MAX_FINDINGS = 20
MATES = "mates"
"""Regime of healthy requests in a step with a poisoned one."""
MEMORY_CONTROLS = {"guard": "guard", "unwritten": "unwritten", "input": "input"}
"""By control: the kind of touch that must be seen."""


class _Verdict(NamedTuple):
    status: Status
    summary: str
    next_step: str


def bound_share(row: Mapping[str, Any], factor: float, floor_ulp: float, hard_cap: float) -> float:
    """The candidate's error over its bound, the larger of relative L2 and worst element; above 1 fails.

    An error without any room (stock exact, an all-zero row) is infinite. Underflow is no error: `floor_ulp`
    times the row's `least` is allowed whatever stock and the cap say.
    """
    floor, underflow = floor_ulp * row["ulp"], floor_ulp * row["least"]
    relative = _over(row["optimised_l2"], max(underflow, min(hard_cap, factor * row["stock_l2"] + floor)))
    worst = _over(row["optimised_worst"], max(underflow, factor * row["stock_worst"] + floor))
    return max(relative, worst)


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome of one op in one cell, or of its guard: pure."""
    if check.parameter("implementation") == IMPLEMENTATION:
        return judge_collective(check, samples)
    if dict(check.parameters).get("part") == GROWTH:
        return judge_growth(check, samples)
    if check.parameter("implementation") == "guard":
        return _judge_guard(check, samples)
    if check.parameter("model") is None:
        word = check.parameter("implementation")
        verdict = _Verdict(
            Status.FAIL,
            f"{check.op} has no {word} implementation",
            "add it, or narrow the claim's architectures",
        )
        return _outcome(check, samples, verdict, None)
    if unfit := faults(check, samples):
        return unusable(check, samples, unfit)
    control = _control(check, samples)
    findings = (
        *_process_findings(samples),
        *_error_findings(check, samples),
        *_exact_findings(samples),
        *_touch_findings(samples),
        *_seen_before_findings(samples),
        *_repeat_findings(check, samples),
    )
    return _outcome(
        check,
        samples,
        _verdict(check, samples, control, findings),
        control,
        _figures(check, samples),
        (*findings, *_unsworn_warnings(check), *_spread_warnings(samples)),
    )


def _verdict(check: Check, samples: Samples, control: Control, findings: tuple[Finding, ...]) -> _Verdict:
    errors, exact = _records(samples, "errors"), _records(samples, "exact")
    launches = _records(samples, "launches")
    tampered = [f for f in findings if f.rule == "process_changed"]
    if tampered:  # then no row here can be believed, the control's neither
        return _Verdict(Status.FAIL, tampered[0].message, f"run `{_repeat(check)}`")
    if not control.failed:
        return _Verdict(
            Status.NO_EVIDENCE,
            f"a planted error went unnoticed: {control.observed}",
            "bound or inputs are too tame to tell right from wrong here: sharpen the op's regimes",
        )
    idle = [r["regime"] for r in launches if int(r["counted"]) < 1]
    if idle or not launches:
        return _Verdict(
            Status.NO_EVIDENCE,
            f"the launch counter did not rise in {', '.join(map(str, idle)) or 'any regime'}: path not taken",
            "find what ran instead of the optimised op",
        )
    shared = _shared(samples, "optimised")
    if shared > check.number("max_shared_operations"):
        return _Verdict(
            Status.NO_EVIDENCE,
            f"the candidate does {shared:.0%} of stock's own torch operations: it is stock by another name",
            "run an implementation of its own",
        )
    if findings:
        first = findings[0]
        return _Verdict(
            Status.FAIL, f"{len(findings)} findings; first: {first.message}"[:600], f"run `{_repeat(check)}`"
        )
    worst = max((_share(check, r) for r in errors), default=0.0)
    said = f"worst error is {worst:.2f} of its bound over {len(errors)} rows" if errors else ""
    equal = f"{len(exact)} exact outputs equal" if exact else ""
    return _Verdict(Status.PASS, ", ".join(filter(None, (said, equal))), "")


def _error_findings(check: Check, samples: Samples) -> tuple[Finding, ...]:
    """Tokens above their bound, worst first."""
    rows = (*_records(samples, "errors"), *_records(samples, "mates"))
    over = [(share, r) for r in rows if (share := _share(check, r)) > 1]
    over.sort(key=lambda pair: -pair[0])
    return tuple(
        Finding(
            rule="error_from_a_batch_mate" if r["regime"] == MATES else "error_above_bound",
            severity=Severity.ERROR,
            message=f"{r['output']} token {r['token']} in {r['regime']}: error {share:.3g} times its bound "
            f"(relative L2 {r['optimised_l2']:.3g}, stock {r['stock_l2']:.3g}; worst element "
            f"{r['optimised_worst']:.3g}, stock {r['stock_worst']:.3g})",
            remedy=f"{len(over)} rows are above their bound",
        )
        for share, r in over[:MAX_FINDINGS]
    )


def _exact_findings(samples: Samples) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            rule="exact_output_differs",
            severity=Severity.ERROR,
            message=f"{r['output']} in {r['regime']}: {r['mismatches']} of {r['elements']} elements differ",
        )
        for r in (*_records(samples, "exact"), *_records(samples, "mates_exact"))
        if r["mismatches"]
    )


def _touch_findings(samples: Samples) -> tuple[Finding, ...]:
    """Memory that the candidate changed and must not have, or did not write and must have."""
    words = {
        "guard": "was written outside of its bounds",
        "gap": "was written between its rows",
        "input": "is an input and was changed",
        "untouched_state": "was changed where the op does not own it",
        "unwritten": "was not written in full",
        "version": "is an input that was written in place, whatever it holds now",
    }
    return tuple(
        Finding(
            rule=f"memory_{r['kind']}",
            severity=Severity.ERROR,
            message=f"{r['argument']} {words[str(r['kind'])]} ({r['bytes']} bytes, regime {r['regime']})",
        )
        for r in _records(samples, "touches")
        if r["arm"] == "optimised"
    )


def _process_findings(samples: Samples) -> tuple[Finding, ...]:
    """What the candidate replaced in the process that computes its errors."""
    return tuple(
        Finding(
            rule="process_changed",
            severity=Severity.ERROR,
            message=f"the candidate replaced {r['name']} in the process that tries it",
        )
        for r in _records(samples, "process")
        if r["arm"] == "optimised"
    )


def _seen_before_findings(samples: Samples) -> tuple[Finding, ...]:
    """A candidate that does less for inputs that it has seen: its time on them is no one's."""
    counts = {str(r["arm"]): int(r["count"]) for r in _records(samples, "operations")}
    if "second" not in counts or (_shared(samples, "second") == 1 and counts["second"] == counts["first"]):
        return ()
    message = (
        f"{counts['first']} torch operations on inputs that were never there before, {counts['second']} on "
        "the same again: answers are kept by content"
    )
    return (Finding(rule="answers_kept_by_content", severity=Severity.ERROR, message=message),)


def _repeat_findings(check: Check, samples: Samples) -> tuple[Finding, ...]:
    """Answers that differ from run to run on equal inputs, where the pack says that they never do."""
    if dict(check.parameters).get("is_deterministic") is not True:
        return ()
    rows = [("", r) for r in _records(samples, "repeats")]
    rows += [
        (" over many runs", r)
        for r in _records(samples, "spread")
        if (r["arm"], r["over"]) == ("optimised", "repeats")
    ]
    return tuple(
        Finding(
            rule="differs_from_run_to_run",
            severity=Severity.ERROR,
            message=f"{r['output']}: {r['differing']} of {r['elements']} elements differ between runs on "
            f"equal inputs{words}, though the op is said to be deterministic: look for a race",
        )
        for words, r in rows
        if int(r["differing"])
    )


def _unsworn_warnings(check: Check) -> tuple[Finding, ...]:
    """Says where runs that differ fail nothing: the word is the judged pack's own, and it may drop it.

    Plans from before it was asked say nothing.
    """
    if dict(check.parameters).get("is_deterministic") is not False:
        return ()
    message = (
        f"the pack does not say that {check.op} is deterministic: answers that differ from run to run "
        "on equal inputs fail nothing"
    )
    return (Finding(rule="determinism_not_claimed", severity=Severity.WARNING, message=message),)


def _spread_warnings(samples: Samples) -> tuple[Finding, ...]:
    """Where the candidate's own answers differ more than stock's do; it fails nothing."""
    shares = _spread_shares(samples)
    return tuple(
        Finding(
            rule="less_deterministic_than_stock",
            severity=Severity.WARNING,
            message=f"{output} over {over}: {share:.2g} of its elements differ, stock's {stock:.2g}",
        )
        for (arm, over, output), share in shares.items()
        if arm == "optimised" and share > (stock := shares.get(("stock", over, output), 0.0))
    )


def _spread_shares(samples: Samples) -> dict[tuple[str, str, str], float]:
    """Share of elements that differ, by (arm, over what, output)."""
    return {
        (str(r["arm"]), str(r["over"]), str(r["output"])): r["differing"] / r["elements"]
        for r in _records(samples, "spread")
        if r["elements"]
    }


def _jitter_differs(samples: Samples, reader: str) -> int:
    """Rounds behind a late predecessor in which a reader saw anything else than without."""
    rows = [r for r in _records(samples, "jitter") if r["reader"] == reader and r["differing"]]
    return len({r["round"] for r in rows})


def _control(check: Check, samples: Samples) -> Control:
    """Whether every spoiled result was noticed by the rule that judges the candidate."""
    noticed: dict[str, bool] = {}
    for r in _records(samples, "control_errors"):
        name = f"{r['control']} {r['output']}"
        if not str(r["control"]).startswith("ladder"):
            noticed[name] = noticed.get(name, False) or _share(check, r) > 1
    for r in _records(samples, "control_exact"):
        noticed[f"{r['control']} {r['output']}"] = bool(r["mismatches"])
    kinds = {(r["control"], r["kind"]) for r in _records(samples, "control_touches")}
    planted = {r["control"] for r in _records(samples, "control_touches")}
    for control, kind in MEMORY_CONTROLS.items():
        if control in planted or control == "guard":
            noticed[f"memory {control}"] = (control, kind) in kinds
    if dict(check.parameters).get("spread"):  # plans of this harness on
        planted_names = {r["name"] for r in _records(samples, "process") if r["arm"] == "planted"}
        noticed["checker replaced"] = bool(planted_names)
        noticed["answer kept by content"] = _shared(samples, "remembered") < 1
    if samples.table("jitter") is not None:
        noticed["read above the wait"] = _jitter_differs(samples, "early") > 0
        noticed["read below the wait is right"] = _jitter_differs(samples, "patient") == 0
    noticed["stock by another name"] = _shared(samples, "disguised") > check.number("max_shared_operations")
    missed = [name for name, seen in noticed.items() if not seen]
    observed = f"not noticed: {', '.join(missed)}" if missed else f"{len(noticed)} spoiled results noticed"
    return Control(
        kind="poison",
        description="the output scaled just above its bound, one element off, rows swapped, zeroed, NaN; "
        "memory touched; stock run as the candidate",
        failed=not missed,
        observed=observed[:500],
    )


def _figures(check: Check, samples: Samples) -> tuple[Figure, ...]:
    errors = _records(samples, "errors")
    shares = [_share(check, r) for r in errors]
    repeats = _records(samples, "repeats")
    elements = sum(int(r["elements"]) for r in repeats)
    differing = sum(int(r["differing"]) for r in repeats)
    return (
        _figure("worst_bound_share", max(shares) if shares else None, "no inexact output"),
        _figure("stock_relative_l2", max((r["stock_l2"] for r in errors), default=None), "no inexact output"),
        _figure(
            "optimised_relative_l2",
            max((r["optimised_l2"] for r in errors), default=None),
            "no inexact output",
        ),
        _figure("compared_rows", len(errors) + len(_records(samples, "exact")), ""),
        _figure("launches", sum(int(r["counted"]) for r in _records(samples, "launches")), ""),
        _figure(
            "repeat_identical_share", 1 - differing / elements if elements else None, "no repeat was run"
        ),
        _figure("shared_operations", _shared(samples, "optimised"), ""),
        *_spread_figures(samples),
        *_sharpness(check, samples),
    )


def _spread_figures(samples: Samples) -> Iterator[Figure]:
    """The most that either arm's answers differ by, over what; and rounds that a late predecessor moved."""
    shares = _spread_shares(samples)
    for arm, over in sorted({(arm, over) for arm, over, _ in shares}):
        worst = max(share for key, share in shares.items() if key[:2] == (arm, over))
        yield _figure(f"{arm}_spread_{over}", worst, "")
    if samples.table("jitter") is not None:
        yield _figure("rounds_moved_by_a_late_predecessor", _jitter_differs(samples, "optimised"), "")


def _sharpness(check: Check, samples: Samples) -> tuple[Figure, ...]:
    """For each inexact output, the smallest planted relative error that the rule notices."""
    by_output: dict[str, list[float]] = {}
    for r in _records(samples, "control_errors"):
        if str(r["control"]).startswith("ladder:"):
            kept = by_output.setdefault(str(r["output"]), [])
            if _share(check, r) > 1:
                kept.append(float(str(r["control"]).removeprefix("ladder:")))
    return tuple(
        _figure(f"smallest_noticed_{name}", min(found) if found else None, "no planted error was noticed")
        for name, found in by_output.items()
    )


def _judge_guard(check: Check, samples: Samples) -> Outcome:
    """The guard must say what the claim says. The control is a guard that takes everything."""
    if unfit := misshapen(samples, GUARD_SHAPES):
        return unusable(check, samples, unfit)
    rows = _records(samples, "guard")
    outside = [r for r in rows if not r["must_take"]]
    wrong = [r for r in rows if r["takes"] != r["must_take"]]
    control = Control(
        kind="planted",
        description="a guard that takes every cell",
        failed=bool(outside),
        observed=f"it would be wrong in {len(outside)} of {len(rows)} cells",
    )
    if not outside or len(outside) == len(rows):
        verdict = _Verdict(
            Status.NO_EVIDENCE,
            f"{len(rows)} cells, {len(outside)} of them outside: both sides of an edge are needed",
            "give the claim an envelope with an inside and an outside",
        )
    elif wrong:
        first = wrong[0]
        word = "declines" if first["must_take"] else "takes"
        verdict = _Verdict(
            Status.FAIL,
            f"the guard is not the claim's in {len(wrong)} of {len(rows)} cells; it {word} {first['cell']}",
            "derive the guard from the claim",
        )
    else:
        verdict = _Verdict(
            Status.PASS, f"{len(rows) - len(outside)} cells taken, {len(outside)} declined", ""
        )
    findings = tuple(
        Finding(
            rule="guard_disagrees",
            severity=Severity.ERROR,
            message=f"{r['cell']}: the claim says {r['must_take']}, the guard {r['takes']}",
        )
        for r in wrong[:MAX_FINDINGS]
    )
    return _outcome(check, samples, verdict, control, (), findings)


def _share(check: Check, row: Mapping[str, Any]) -> float:
    return bound_share(row, check.number("factor"), check.number("floor_ulp"), check.number("hard_cap"))


def _shared(samples: Samples, arm: str) -> float:
    rows = _records(samples, "operations")
    return next((float(r["shared"]) for r in rows if r["arm"] == arm), 0.0)


def _over(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    return error / bound if bound > 0 else float("inf")


def _figure(name: str, value: float | int | None, missing: str) -> Figure:
    if value is not None and value == float("inf"):
        return Figure(name=name, value=None, missing="an error where stock has none and none is allowed")
    return Figure(name=name, value=value, missing=None if value is not None else missing)


def _repeat(check: Check) -> str:
    cell = check.cell.label() if check.cell else ""
    return f"fasttrack kernels test {check.op} --cell {cell}"


def _records(samples: Samples, name: str) -> Sequence[dict[str, Any]]:
    table = samples.table(name)
    return table.records() if table else ()


def _outcome(
    check: Check,
    samples: Samples,
    verdict: _Verdict,
    control: Control | None,
    figures: tuple[Figure, ...] = (),
    findings: tuple[Finding, ...] = (),
) -> Outcome:
    return Outcome(
        check=check.id,
        status=verdict.status,
        tier=samples.tier,
        summary=verdict.summary,
        next_step=verdict.next_step,
        control=control,
        figures=figures,
        findings=findings,
    )
