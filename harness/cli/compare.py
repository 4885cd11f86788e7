"""Compare one stage of two bundles: first whether they can be compared at all, then figure by figure.

Exit code 0: alike, as every figure's intervals overlap or agree; 1: not; 2: not comparable.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # records load when a command runs
    from harness.domain.check import Check, Figure, Outcome, StageName
    from harness.evidence.reader import Bundle

__all__ = ["compare_stage"]

RELATIVE_TOLERANCE = 0.05
"""For figures without an interval: what repeats of one run on one machine differ by."""


def compare_stage(first: Path, second: Path, stage: "StageName", *, as_json: bool) -> int:
    """Print the comparison of a stage; gives the exit code. Raises `EvidenceError` for a broken bundle."""
    from harness.cli.console import out, outcome_table, print_json
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle

    with bundle_folder(first) as one_folder, bundle_folder(second) as two_folder:
        one, two = open_bundle(one_folder), open_bundle(two_folder)
        obstacles = _obstacles(one, two, stage)
        rows = [] if obstacles else _rows(one, two, stage)
    code = 2 if obstacles else int(any(not alike for _, _, alike in rows))
    if as_json:
        print_json({"obstacles": obstacles, "rows": [[c, w, a] for c, w, a in rows], "exit_code": code})
        return code
    for obstacle in obstacles:
        out.print(f"not comparable: {obstacle}", markup=False, soft_wrap=True)
    if rows:
        table = [("alike" if alike else "differs", check, words) for check, words, alike in rows]
        out.print(outcome_table(f"{stage.value}: {first.name} against {second.name}", table))
    return code


def _obstacles(one: "Bundle", two: "Bundle", stage: "StageName") -> list[str]:
    """Why figures of the two must not be put side by side; empty when they may."""
    found = []
    a, b = one.plan.machine, two.plan.machine
    if a.cpu_model != b.cpu_model or [g.name for g in a.gpus] != [g.name for g in b.gpus]:
        found.append(f"machines differ: {_named(a)} and {_named(b)}")
    if dict(a.libraries).get("torch") != dict(b.libraries).get("torch"):
        found.append("torch versions differ")
    first, second = _checks(one, stage), _checks(two, stage)
    if not first.keys() & second.keys():
        found.append(f"no {stage.value} check is in both")
    found += [
        f"{name} was asked with other thresholds or parameters"
        for name in first.keys() & second.keys()
        if first[name].model_copy(update={"parameters": _without_seed(first[name])})
        != second[name].model_copy(update={"parameters": _without_seed(second[name])})
    ]
    return sorted(found)


def _named(machine: object) -> str:
    gpus = [gpu.name for gpu in machine.gpus]  # type: ignore[attr-defined]  # a Machine, whose module loads late
    return ", ".join(gpus) or str(machine.cpu_model)  # type: ignore[attr-defined]  # as above


def _without_seed(check: "Check") -> tuple[tuple[str, object], ...]:
    return tuple((key, value) for key, value in check.parameters if key != "seed")


def _checks(bundle: "Bundle", stage: "StageName") -> "Mapping[str, Check]":
    done = {outcome.check for outcome in bundle.outcomes}
    return {c.id: c.model_copy(update={"cost_s": 0.0}) for c in bundle.plan.of_stage(stage) if c.id in done}


def _rows(one: "Bundle", two: "Bundle", stage: "StageName") -> list[tuple[str, str, bool]]:
    first = {o.check: o for o in one.outcomes}
    second = {o.check: o for o in two.outcomes}
    both = [c.id for c in one.plan.of_stage(stage) if c.id in first and c.id in second]
    return [(name, *_compared(first[name], second[name])) for name in both]


def _compared(one: "Outcome", two: "Outcome") -> tuple[str, bool]:
    """(words, whether alike): statuses first, then every figure that both have."""
    if one.status is not two.status:
        return f"{one.status.value} and {two.status.value}", False
    figures = {f.name: f for f in two.figures}
    differing = [
        f"{f.name} {f.value} and {figures[f.name].value}"
        for f in one.figures
        if f.name in figures and not _alike(f, figures[f.name])
    ]
    return (
        (f"{one.status.value}; " + "; ".join(differing), False)
        if differing
        else (f"{one.status.value}, all figures", True)
    )


def _alike(one: "Figure", two: "Figure") -> bool:
    if one.value is None or two.value is None:
        return one.value == two.value
    if None not in (one.low, one.high, two.low, two.high):
        return bool(one.low <= two.high and two.low <= one.high)  # type: ignore[operator]  # none is None here
    return abs(one.value - two.value) <= RELATIVE_TOLERANCE * max(abs(one.value), abs(two.value))
