"""From rows to an outcome: pure, so that anyone can judge a bundle's samples again.

The control comes first (were the planted faults caught, in the planted kernels and in this one), then what is
wrong, then what could not be told.
"""

import re
from typing import Any

from harness.domain.check import Check, Control, Figure, Finding, Outcome, Samples, Severity, Status
from harness.domain.record import Scalar
from harness.domain.table_shape import misshapen, unusable
from harness.stages.audit import cost
from harness.stages.audit.facts import AccessFact, ProgramFact
from harness.stages.audit.launches import launch_findings
from harness.stages.audit.limits import loosening_findings, lost_findings
from harness.stages.audit.rules import access_findings, program_findings, unclassed
from harness.stages.audit.tables import SHAPES

__all__ = ["judge"]

MAX_FINDINGS = 60
COSTS = ("spill", "registers", "shared_memory", "cluster", "multicast", "block_size", "wide_loads")
"""Rules with a limit, named as the check's threshold is."""


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome from what was read: pure."""
    if check.parameter("variant") is None:
        arch = check.cell.arch if check.cell else ""
        return _outcome(
            check,
            samples,
            Status.FAIL,
            f"op {check.op} has no kernel variant for {arch}, which the claim names",
            "add a variant that names the architecture, or narrow the claim",
        )
    if unfit := misshapen(samples, SHAPES):
        return unusable(check, samples, unfit)
    variant, target = (_value(samples, "compile", name) for name in ("variant", "target"))
    if variant != check.parameter("variant"):
        said = f"they were read from variant {variant}, not {check.parameter('variant')}"
        return unusable(check, samples, (said,))
    error = _value(samples, "compile", "error")
    if error is not None:
        return _outcome(check, samples, Status.FAIL, f"does not compile: {error}"[:500], _again(check))
    missing = _value(samples, "compile", "missing")
    if missing is None and (check.cell is None or target != check.cell.arch):
        said = f"the machine code is for {target or 'no target that it names'}"
        return _outcome(
            check,
            samples,
            Status.FAIL,
            f"{said}, not for {check.cell.arch if check.cell else 'one of the claim'}",
            "compile each variant for the architecture that it is asked for",
        )
    programs = tuple(ProgramFact(**r) for r in _records(samples, "programs"))
    accesses = tuple(AccessFact(**r) for r in _records(samples, "accesses"))
    control = _control(samples)
    figures = cost.figures(samples, programs, accesses)
    if missing is not None or {p.level for p in programs} != {"ptx", "sass"} or not accesses:
        reason = (
            missing or f"{len(programs)} programs with {len(accesses)} accesses to global memory were read"
        )
        return _outcome(
            check,
            samples,
            Status.NO_EVIDENCE,
            f"the kernel was not read at both levels: {reason}",
            "install the disassembler, or look at the kept PTX and SASS",
            figures=figures,
        )
    if not all(p.has_matched_roles for p in programs):
        return _outcome(
            check,
            samples,
            Status.INCONCLUSIVE,
            "declared parameters do not match the kernel's, so that no access has a role",
            "name the kernel's tensor parameters in launch order",
            control,
            figures,
        )
    wrong, unknown = launch_findings(_records(samples, "launches"), _sizes(check))
    findings = _waived(
        check,
        (
            *access_findings(programs, accesses),
            *_placed(
                check,
                accesses,
                (
                    *wrong,
                    *_cost_findings(check, samples, programs, accesses),
                    *loosening_findings(check, samples),
                    *lost_findings(samples),
                ),
            ),
        ),
    )
    figures = (
        *figures,
        Figure(name="unbounded_launch_sizes", value=unknown),
        _limits_figure(check, samples),
    )
    return _decide(check, samples, control, figures, findings, len(unclassed(accesses)), programs)


def _decide(
    check: Check,
    samples: Samples,
    control: Control,
    figures: tuple[Figure, ...],
    findings: tuple[Finding, ...],
    strangers: int,
    programs: tuple[ProgramFact, ...],
) -> Outcome:
    """Control first, then what is wrong, then what could not be told."""
    standing = [f for f in findings if f.waived is None and f.severity is Severity.ERROR]
    shown = findings[:MAX_FINDINGS]
    if not control.failed:
        return _outcome(
            check,
            samples,
            Status.NO_EVIDENCE,
            f"a planted fault was not caught: {control.observed}",
            "mend the audit's rules or its planted kernels; no audit counts until then",
            control,
            figures,
            shown,
        )
    if standing:
        rules = ", ".join(dict.fromkeys(f.rule for f in standing))
        return _outcome(
            check,
            samples,
            Status.FAIL,
            f"{len(standing)} findings: {rules}",
            standing[0].remedy,
            control,
            figures,
            shown,
        )
    unresolved = sum(p.unresolved for p in programs)
    if unresolved or strangers > check.number("max_unclassed"):
        what = (
            f"{unresolved} branches or calls go to unknown places"
            if unresolved
            else f"{strangers} accesses could not be traced to a parameter"
        )
        return _outcome(
            check,
            samples,
            Status.INCONCLUSIVE,
            what,
            "write the address so that it can be traced to a parameter, or take the branch apart",
            control,
            figures,
            shown,
        )
    unbounded = next(f.value for f in figures if f.name == "unbounded_launch_sizes")
    if unbounded:
        return _outcome(
            check,
            samples,
            Status.INCONCLUSIVE,
            f"{unbounded} launch sizes cannot be bounded over the envelope",
            "say in the pack what bounds each size that the grid depends on",
            control,
            figures,
            shown,
        )
    count, spilled = (
        next(f.value for f in figures if f.name == name) for name in ("accesses", "spill_bytes")
    )
    return _outcome(
        check,
        samples,
        Status.PASS,
        f"{count} accesses at both levels, all of them allowed; {spilled} bytes spilled",
        "",
        control,
        figures,
        shown,
    )


def _waived(check: Check, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    waivers = {
        t.name.removeprefix("waived."): str(t.value) for t in check.thresholds if t.name.startswith("waived.")
    }
    return tuple(f.model_copy(update={"waived": waivers.get(f.rule)}) for f in findings)


def _sizes(check: Check) -> dict[str, tuple[int, int]]:
    """Ranges of what grids depend on, as the plan says them (`x.0=1..64`)."""
    found = re.findall(r"(\S+)=(\d+)\.\.(\d+)", str(check.parameter("sizes") or ""))
    return {place: (int(low), int(high)) for place, low, high in found}


def _control(samples: Samples) -> Control:
    """Whether every planted fault was caught, every twin clean, and every fault planted in this kernel
    noticed.
    """
    rows = _records(samples, "control")
    wrong = [
        f"{r['name']}: expected {r['expected']}, said {r['observed']}"
        for r in rows
        if r["is_right"] is not True
    ]
    faults = sum(r["expected"] != "clean" for r in rows)
    by_mutation: dict[str, list[AccessFact]] = {}
    for record in _records(samples, "mutants"):
        facts = by_mutation.setdefault(str(record.pop("mutation")), [])
        if record["subject"] is not None:
            facts.append(AccessFact(**record))
    missed = [m for m, facts in by_mutation.items() if not access_findings([], facts)]
    observed = (
        f"caught {faults} planted faults and {len(by_mutation)} own mutants; {len(rows) - faults} twins clean"
    )
    bad = [*wrong, *(f"{m} went unnoticed" for m in missed)]
    return Control(
        kind="planted",
        description="planted kernels; this kernel without its wait, and with non-coherent loads",
        failed=bool(faults) and not bad,
        observed="; ".join(bad)[:500] if bad else observed,
    )


def _cost_findings(
    check: Check, samples: Samples, programs: tuple[ProgramFact, ...], accesses: tuple[AccessFact, ...]
) -> tuple[Finding, ...]:
    limits = {
        name: int(check.number(name)) for name in COSTS if any(t.name == name for t in check.thresholds)
    }
    return program_findings(cost.costs(samples, programs, accesses), limits)


def _limits_figure(check: Check, samples: Samples) -> Figure:
    """How many limits the base held this kernel to."""
    table = samples.table("base_limits")
    if table is None:
        why = (
            "no repository was read" if check.parameter("limits_file") else "the pack names no file of limits"
        )
        return Figure(name="limits_of_base", value=None, missing=why)
    return Figure(
        name="limits_of_base", value=len(table.rows), note="none: the base does not know the kernel"
    )


def _placed(
    check: Check, accesses: tuple[AccessFact, ...], findings: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """Findings over a whole kernel, at the first line of its module that reads or writes memory."""
    source = dict(check.parameters).get("source")  # plans of earlier versions have none
    if not isinstance(source, str):
        return findings
    lines = [a.line for a in accesses if a.path == source and a.line]
    place = {"path": source, "line": min(lines, default=None)}
    return tuple(f.model_copy(update=place) for f in findings)


def _records(samples: Samples, name: str) -> tuple[dict[str, Any], ...]:
    """Rows of a table; their columns are the fields of the fact they were made from."""
    table = samples.table(name)
    return table.records() if table else ()


def _value(samples: Samples, table: str, column: str) -> Scalar:
    found = samples.table(table)
    return None if found is None else found.records()[0][column]


def _again(check: Check) -> str:
    return f"read audit-compile.log of the run, then `fasttrack run audit`; the variant is {check.subject}"


def _outcome(
    check: Check,
    samples: Samples,
    status: Status,
    summary: str,
    next_step: str,
    control: Control | None = None,
    figures: tuple[Figure, ...] = (),
    findings: tuple[Finding, ...] = (),
) -> Outcome:
    return Outcome(
        check=check.id,
        status=status,
        tier=samples.tier,
        summary=summary,
        next_step=next_step,
        control=control,
        figures=figures,
        findings=findings,
    )
